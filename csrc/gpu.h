// What the kernels shared by CUDA and HIP need of either: the runtime under CUDA's names, and warps of 32 lanes.
#pragma once

#include <cstdint>

#if defined(__HIP_PLATFORM_AMD__)

#include <hip/hip_runtime.h>

using cudaError_t = hipError_t;
using cudaStream_t = hipStream_t;
constexpr cudaError_t cudaSuccess = hipSuccess;
inline cudaError_t cudaGetLastError() { return hipGetLastError(); }

#else

#include <cuda_runtime_api.h>

#endif

namespace mla_prefill {

#if defined(__HIPCC__)

// A wave of 64 lanes is two warps, which run in lockstep.

// The value of the lane `step` below; a lane without one keeps its own.
__device__ __forceinline__ int32_t shuffle_up(int32_t value, int step) { return __shfl_up(value, step, 32); }

// The value of any lane of the warp, modulo 32. All lanes call it.
__device__ __forceinline__ int32_t shuffle(int32_t value, int lane) { return __shfl(value, lane, 32); }

// The lanes of the warp whose value is the same, as bits. All lanes call it; values are in [-256, 256).
__device__ __forceinline__ uint32_t lanes_alike(int32_t value) {
  uint64_t alike = ~(uint64_t)0;
  for (int bit = 0; bit < 9; ++bit) {
    const bool set = value >> bit & 1;
    const uint64_t lanes = __ballot(set);
    alike &= set ? lanes : ~lanes;
  }
  return (uint32_t)(threadIdx.x & 32 ? alike >> 32 : alike);
}

// What a lane reads before it, no other lane of the warp has overwritten after it.
__device__ __forceinline__ void sync_warp() { __builtin_amdgcn_wave_barrier(); }

#elif defined(__CUDACC__)

__device__ __forceinline__ int32_t shuffle_up(int32_t value, int step) { return __shfl_up_sync(~0u, value, step); }
__device__ __forceinline__ int32_t shuffle(int32_t value, int lane) { return __shfl_sync(~0u, value, lane); }
__device__ __forceinline__ uint32_t lanes_alike(int32_t value) { return __match_any_sync(~0u, value); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

#endif

}  // namespace mla_prefill
