// Stands in for ROCm's header where device code is compiled without ROCm: only the names that csrc uses.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(threads, threads)))

// ---- The host side: what a launch needs to be parsed ----------------------------------------------------------------

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
enum hipError_t { hipSuccess = 0 };
using hipStream_t = struct ihipStream_t*;
extern "C" hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, hipStream_t stream);
extern "C" hipError_t hipGetLastError();

// ---- The device side ------------------------------------------------------------------------------------------------

struct ThreadIndex {
  struct X {
    __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_workitem_id_x(); }
  } x;
};
struct BlockIndex {
  struct X {
    __device__ __forceinline__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_x(); }
  } x;
};
static constexpr __device__ ThreadIndex threadIdx = {};
static constexpr __device__ BlockIndex blockIdx = {};

__device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ __forceinline__ uint64_t __ballot(bool condition) { return __builtin_amdgcn_ballot_w64(condition); }

__device__ __forceinline__ int __shfl(int value, int from, int width) {
  const int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
  return __builtin_amdgcn_ds_bpermute((lane / width * width + (from & (width - 1))) * 4, value);
}
__device__ __forceinline__ int __shfl_up(int value, unsigned step, int width) {
  const int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
  const int from = lane % width < (int)step ? lane : lane - (int)step;
  return __builtin_amdgcn_ds_bpermute(from * 4, value);
}

__device__ __forceinline__ int atomicAdd(int* at, int value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ int atomicMin(int* at, int value) {
  return __hip_atomic_fetch_min(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ int atomicMax(int* at, int value) {
  return __hip_atomic_fetch_max(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ __forceinline__ int __popc(unsigned bits) { return __builtin_popcount(bits); }
__device__ __forceinline__ int min(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ __forceinline__ float fabsf(float x) { return __builtin_fabsf(x); }
__device__ __forceinline__ float exp2f(float x) { return __builtin_amdgcn_exp2f(x); }
__device__ __forceinline__ float logf(float x) { return __builtin_amdgcn_logf(x) * 0.6931471805599453f; }
