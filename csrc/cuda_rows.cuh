// What the CUDA kernels of ragged_prefill do with fragments and finished rows alike: numbers, and the way from
// accumulators to out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "params.h"

namespace mla_prefill {

constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {  // -inf of 0
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Round to nearest even.
template <typename T>
__device__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <typename T>
__device__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane l gives the address of row l % 8 of matrix l / 8, and
// gets of each matrix columns 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// How a finished row enters out, out = own * o + running * out, and its lse then.
struct RowWeights {
  float own, running, lse;
  bool store;
};

__device__ __forceinline__ RowWeights weights_of_row(float sum, float lse, bool valid) {
  return {sum == 0.0f ? 0.0f : reciprocal_approx(sum), 0.0f, lse, valid};
}

__device__ __forceinline__ float* lse_of_row(const PrefillParams& p, int64_t row, int head) {
  return p.lse.data + head * p.lse.head_stride + row * p.lse.row_stride;
}

// Merges a row into the running state whose lse is there. Whole warps; the first lane of a quad reads for it.
__device__ __forceinline__ void merge_with_running(RowWeights& w, float sum, const float* at) {
  float running_lse = threadIdx.x % 4 == 0 && w.store ? *at : 0.0f;
  running_lse = __shfl_sync(~0u, running_lse, 0, 4);
  if (isinf(running_lse)) return;    // +inf and -inf both mark an empty state, whatever out holds
  w.store = w.store && sum != 0.0f;  // a row without keys leaves a live state as it is
  const float top = fmaxf(running_lse, w.lse);
  const float running = exp2_approx((running_lse - top) * kLog2E);
  const float added = exp2_approx((w.lse - top) * kLog2E);
  const float scale = reciprocal_approx(running + added);
  w.running = running * scale;
  w.own *= added * scale;
  w.lse = top + log2_approx(running + added) * kLn2;
}

__device__ __forceinline__ void store_lse(const RowWeights& w, float* at) {
  if (threadIdx.x % 4 == 0 && w.store) *at = w.lse;
}

// A lane holds one word (two columns) of each of two neighbouring blocks of 8 columns. Afterwards an even lane holds
// its word and the next lane's of the first block, an odd lane the lane's before and its own of the second: 8 bytes in
// a row, 32 of a quad. It is its own inverse.
__device__ __forceinline__ void exchange_words(uint32_t& first, uint32_t& second) {
  const bool odd = threadIdx.x & 1;
  const uint32_t received = __shfl_xor_sync(~0u, odd ? first : second, 1);
  (odd ? first : second) = received;
}

}  // namespace mla_prefill
