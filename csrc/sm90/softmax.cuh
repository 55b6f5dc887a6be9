// Online softmax of a warpgroup's score fragment, and its mask.
//
// A thread holds two rows of wgmma's accumulator, fragment_row(thread) and that + 8: of s[4 i .. 4 i + 3] the first two
// are columns 8 i + 2 (lane % 4) and the next of the first row, the last two the same columns of the second. The four
// lanes of a quad share their rows.
#pragma once

#include "cuda_rows.cuh"
#include "sm90/ptx.h"

namespace mla_prefill::sm90 {

__device__ __forceinline__ int fragment_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

struct RowLimits {
  int32_t last_key[2];
};

struct RowSums {
  float sum[2];  // of exp(logit - max), 0 where the row saw no key
  float lse[2];  // natural log of the sum of exp(logit), -inf where the row saw no key
};

// The factor for what was summed against the maximum `before` when the maximum becomes `now`. Between the rounded
// references that the weights were taken against, so that it is exactly 1 while the maximum stays: a fused product
// would leave a factor of its rounding error at each key tile. 0 for a row that had seen no key.
__device__ __forceinline__ float rescaling(float before, float now, float scale) {
  if (before == -INFINITY) return 0.0f;
  return exp2_approx(__fmul_rn(before, scale * kLog2E) - __fmul_rn(now, scale * kLog2E));
}

template <int kTileKV>
struct OnlineSoftmax {
  float max[2], sum[2], correction[2];

  // Masks scores, turns them into weights and updates the running maximum and sum. kFirst: there are no earlier ones.
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ void update(float (&s)[kTileKV / 2], const RowLimits& limits, int first_key, float scale) {
    if (kMasked) mask(s, limits, first_key);
    const float scale_log2 = scale * kLog2E;
    float first_max[2];
    if (kFirst) row_maxima(s, first_max);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = kFirst ? first_max[r] : running_max(s, r);
      float reference = __fmul_rn(top, scale_log2);
      // As rescaling(), less its test: a maximum that is -inf still is dealt with below.
      if (!kFirst) correction[r] = exp2_approx(__fmul_rn(max[r], scale_log2) - reference);
      // A row that has seen no key: any finite reference makes its weights 0, where -inf would make NaN.
      if (kMasked && top == -INFINITY) {
        reference = 0.0f;
        correction[r] = 0.0f;
      }
      max[r] = top;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < kTileKV / 8; ++i) {
        float &a = s[4 * i + 2 * r], &b = s[4 * i + 2 * r + 1];
        a = exp2_approx(fmaf(a, scale_log2, -reference));
        b = exp2_approx(fmaf(b, scale_log2, -reference));
        added += a + b;
      }
      sum[r] = kFirst ? added : fmaf(sum[r], correction[r], added);
    }
  }

  template <int kSize>
  __device__ __forceinline__ void rescale(float (&o)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      o[2 * i] *= correction[i & 1];
      o[2 * i + 1] *= correction[i & 1];
    }
  }

  __device__ __forceinline__ RowSums finish(float scale) const {
    RowSums result;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      result.sum[r] = total;
      result.lse[r] = total == 0.0f ? -INFINITY : (__fmul_rn(max[r], scale * kLog2E) + __log2f(total)) * kLn2;
    }
    return result;
  }

 private:
  // In the main loop one chain per row is best: the other warpgroup's products hide its latency, and denser arithmetic
  // slows them (2 to 3 % with four chains).
  __device__ __forceinline__ float running_max(const float (&s)[kTileKV / 2], int r) const {
    float top = fmaxf(max[r], s[2 * r]);
#pragma unroll
    for (int i = 0; i < kTileKV / 8; ++i) top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }

  // Both rows side by side in four chains each: nothing hides the latency of a tile's first softmax.
  __device__ __forceinline__ static void row_maxima(const float (&s)[kTileKV / 2], float (&top)[2]) {
    float chain[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kTileKV / 4; ++i) {
        const float score = s[i / 2 * 4 + 2 * r + i % 2];
        chain[r][i % 4] = i < 4 ? score : fmaxf(chain[r][i % 4], score);
      }
      top[r] = fmaxf(fmaxf(chain[r][0], chain[r][1]), fmaxf(chain[r][2], chain[r][3]));
    }
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance) {
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], distance));
    }
  }

  __device__ __forceinline__ static void mask(float (&s)[kTileKV / 2], const RowLimits& limits, int first_key) {
    const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kTileKV / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * i + c > limits.last_key[r] - column) s[4 * i + 2 * r + c] = -INFINITY;
        }
      }
    }
  }
};

}  // namespace mla_prefill::sm90
