// Online softmax of a wave's 32 keys x 32 query rows, and its mask. A lane holds one query row, lane % 32; the keys of
// its 16 scores are 8 (g / 4) + 4 (lane / 32) + g % 4, and lane ^ 32 holds the row's other 16.
#pragma once

#include "hip/config.h"
#include "hip/gcn.h"
#include "params.h"

namespace mla_prefill::hip {

constexpr float kLn2 = 0.6931471805599453f;

// Hides keys past `last_key`, which counts from the lane's first key of the tile.
__device__ __forceinline__ void mask(f32x16& scores, int32_t last_key) {
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    if (8 * (g / 4) + g % 4 > last_key) scores[g] = -kInf;
  }
}

__device__ __forceinline__ float max_of(f32x16 x) {
  float top = x[0];
#pragma unroll
  for (int g = 1; g < 16; ++g) top = __builtin_fmaxf(top, x[g]);
  return top;
}

// Weights are 2^(scale_log2 * score - reference). The reference follows the row's maximum lazily: only when a weight
// would exceed 2^kSlack is it raised to the maximum, and the earlier sums are rescaled. On most tiles one comparison
// per row is left of the running maximum.
template <typename T>
struct OnlineSoftmax {
  static constexpr float kSlack = 8.0f;
  // Small weights in fp16 would be subnormal, of few bits on gfx942 and 0 on gfx90a: they are 2^kLift times as large,
  // so that the largest just fit the format.
  static constexpr float kLift = __is_same(T, __bf16) ? 0.0f : 7.5f;
  static_assert(__is_same(T, __bf16) || kLift + kSlack < 16.0f, "fp16 holds values below 2^16");

  float scale_log2;
  float reference;  // 0 until the row has seen a key: a finite number, so that hidden scores get weight 0
  float limit;      // exponents above it raise the reference; -inf until the row has seen a key
  f32x2 sum;        // of the lane's own weights, even and odd elements

  __device__ __forceinline__ void start(float scale) {
    scale_log2 = scale * kLog2E;
    reference = 0.0f;
    limit = -kInf;
    sum = {0.0f, 0.0f};
  }

  // Turns scores into weights, packed in pairs. Rescales `o`, the products with earlier weights, where it must.
  __device__ __forceinline__ void update(const f32x16& scores, uint32_t (&weights)[8], f32x16 (&o)[kBlocksV],
                                         int lane) {
    f32x16 exponents = exponents_of(scores);
    if (any_lane(max_of(exponents) > limit)) {
      raise_reference(scores, o, lane);
      exponents = exponents_of(scores);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const f32x2 pair = {exp2_approx(exponents[2 * i]), exp2_approx(exponents[2 * i + 1])};
      sum += pair;
      weights[i] = pack_weights<T>(pair);
    }
  }

 private:
  __device__ __forceinline__ f32x16 exponents_of(const f32x16& scores) const {
    return __builtin_elementwise_fma(scores, f32x16(scale_log2), f32x16(-reference));
  }

  __device__ __forceinline__ void raise_reference(const f32x16& scores, f32x16 (&o)[kBlocksV], int lane) {
    float top = max_of(scores);
    top = __builtin_fmaxf(top, other_half(top, lane));  // both halves of a row decide alike
    // A row's decision is its own: the factor is exactly 1 for those that stay.
    float correction = 1.0f;
    if (__builtin_fmaf(top, scale_log2, -reference) > limit) {
      const float raised = top * scale_log2 - kLift;
      correction = limit == -kInf ? 0.0f : exp2_approx(reference - raised);
      reference = raised;
      limit = kLift + kSlack;
    }
    sum *= correction;
#pragma unroll
    for (int block = 0; block < kBlocksV; ++block) o[block] *= correction;
  }
};

}  // namespace mla_prefill::hip
