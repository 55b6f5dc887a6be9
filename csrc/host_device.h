// Functions that compile for the host and for GPUs.
#pragma once

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>  // where HIP's compilers have these names; nvcc knows them itself
#endif

#if defined(__CUDACC__) || defined(__HIPCC__)
#define MLA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MLA_HOST_DEVICE inline
#endif
