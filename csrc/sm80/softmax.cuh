// Online softmax of a warp's scores, and its mask.
//
// A lane holds rows accumulator_row(lane, 2 r) of each of its m16 tiles, r < 2, and of each n8 block two neighbouring
// columns of them. The four lanes of a quad share their rows.
#pragma once

#include <cfloat>

#include "cuda_rows.cuh"
#include "sm80/layout.h"
#include "sm80/ptx.h"

namespace mla_prefill::sm80 {

// Hides keys past `last_key(m, r)`, the last one that row r of m16 tile m sees, counted from the tile's first key.
template <int kRowTiles, int kBlocks, typename LastKey>
__device__ __forceinline__ void mask(float (&s)[kRowTiles][kBlocks][4], int lane, LastKey last_key) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t last = last_key(m, r) - accumulator_column(lane, 0);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * n + c > last) s[m][n][2 * r + c] = -INFINITY;
        }
      }
    }
  }
}

// Weights are 2^(scale_log2 * score - reference). The reference follows the row's maximum lazily: only when a weight
// would exceed 2^kSlack is it raised to the maximum, and the earlier sums are rescaled. Each row decides for itself, so
// that its result does not depend on its neighbours; a warp votes only whether there is anything to do.
template <int kRowTiles>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;

  // Of a row that has seen no key: below any logit, so that the first one raises it, and finite, so that hidden scores
  // get weight 0 where -inf would make NaN.
  static constexpr float kNoReference = -FLT_MAX;

  float reference[kRowTiles][2];
  float sum[kRowTiles][2];  // of the lane's own weights

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        reference[m][r] = kNoReference;
        sum[m][r] = 0.0f;
      }
    }
  }

  // Whether the warp must raise a reference. `top`: the lane's largest scores.
  template <int kBlocks>
  __device__ __forceinline__ bool must_raise(const float (&s)[kRowTiles][kBlocks][4], float scale_log2,
                                             float (&top)[kRowTiles][2]) const {
    bool raise = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[m][r] = fmaxf(s[m][0][2 * r], s[m][0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < kBlocks; ++n) top[m][r] = fmaxf(top[m][r], fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        raise |= fmaf(top[m][r], scale_log2, -reference[m][r]) > kSlack;
      }
    }
    return __any_sync(~0u, raise);
  }

  // Then turns the scores of `count` blocks of columns from `begin` on into weights.
  template <int kBlocks>
  __device__ __forceinline__ void weigh(float (&s)[kRowTiles][kBlocks][4], int begin, int count, float scale_log2) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = begin; n < begin + count; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, -reference[m][i / 2]));
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[m][r] += s[m][n][2 * r] + s[m][n][2 * r + 1];
      }
    }
  }

  // The sum of a row's weights, 0 where the row saw no key; the quad's lanes all ask.
  __device__ __forceinline__ float total(int m, int r) const {
    const float half = sum[m][r] + __shfl_xor_sync(~0u, sum[m][r], 1);
    return half + __shfl_xor_sync(~0u, half, 2);
  }

  // Natural log of the sum of exp(logit), -inf where the row saw no key.
  __device__ __forceinline__ float lse(int m, int r, float total) const {
    return total == 0.0f ? -INFINITY : (reference[m][r] + __log2f(total)) * kLn2;
  }

  // Raises references to the maximum where they must be, and rescales `o`, the products with earlier weights.
  template <int kBlocksV>
  __device__ __forceinline__ void raise_references(const float (&lane_top)[kRowTiles][2],
                                                   float (&o)[kRowTiles][kBlocksV][4], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(lane_top[m][r], __shfl_xor_sync(~0u, lane_top[m][r], 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        float correction = 1.0f;  // exactly, for rows that stay
        if (fmaf(top, scale_log2, -reference[m][r]) > kSlack) {
          const float raised = __fmul_rn(top, scale_log2);
          correction = exp2_approx(reference[m][r] - raised);
          reference[m][r] = raised;
        }
        sum[m][r] = __fmul_rn(sum[m][r], correction);  // the same bits wherever it is inlined
#pragma unroll
        for (int n = 0; n < kBlocksV; ++n) {
          o[m][n][2 * r] *= correction;
          o[m][n][2 * r + 1] *= correction;
        }
      }
    }
  }
};

}  // namespace mla_prefill::sm80
