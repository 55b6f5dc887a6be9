// Online softmax of the scores of 16 query rows, for the CUDA kernels of ragged_prefill.
//
// A lane holds what it holds of an accumulator of mma.m16n8k16, or of a warp's part of one of wgmma.m64: row lane / 4
// and the row 8 further on. Of s[4 i .. 4 i + 3] the first two are columns 8 i + 2 (lane % 4) and the next of the first
// row, the last two the same columns of the second. The four lanes of a quad share their rows.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "cuda_rows.cuh"

namespace mla_prefill {

// Hides keys past last[r], the last one that row r sees, counted from the lane's first column.
template <int kSize>
__device__ __forceinline__ void mask(float (&s)[kSize], const int32_t (&last)[2]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i / 4 * 8 + i % 2 > last[i / 2 % 2]) s[i] = -INFINITY;
  }
}

// Weights are 2^(scale_log2 * score - reference), in T beside float. Keys come from the first to the last, so that the
// first tile has a key of each row that sees any: it sets the references. They stay until an exponent reaches kLimit,
// 8 above the largest of the first tile. Then the reference follows, and what was summed before is rescaled. Each row
// decides for itself, so that its result does not depend on its neighbours; a warp votes only whether there is anything
// to do.
template <typename T>
struct OnlineSoftmax {
  // What a reference is above the maximum that set it, and the exponents that raise it. With a limit of 0 a sign tells.
  // fp16 has no room for that: its weights end at 2^-24, and many keys that weigh little count together.
  static constexpr bool kSignTells = !std::is_same_v<T, __half>;
  static constexpr float kAbove = kSignTells ? 8.0f : 0.0f;
  static constexpr float kLimit = 8.0f - kAbove;

  // Of a row that has seen no key: finite, so that hidden scores get weight 0 where -inf would make NaN, and below that
  // of any other piece of the row's keys.
  static constexpr float kNoReference = -FLT_MAX;

  float reference[2];
  float sum[2];  // of the lane's own weights

  __device__ __forceinline__ void start() {
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0.0f;
  }

  // Takes the references from the first tile's scores, and turns them into exponents.
  template <int kSize>
  __device__ __forceinline__ void first(float (&s)[kSize], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = row_maximum(s, r);
      reference[r] = top == -INFINITY ? kNoReference : fmaf(top, scale_log2, kAbove);
      sum[r] = 0.0f;
    }
    shift(s, scale_log2);
  }

  // Turns scores into exponents. True: one of them reaches the limit, or a row has no reference yet, since all its
  // scores were -inf. Then the warp must raise() references.
  template <int kSize>
  __device__ __forceinline__ bool shift(float (&s)[kSize], float scale_log2) const {
    const float shifted_by[2] = {base(0), base(1)};
    int32_t peak = kSignTells ? -1 : INT32_MIN;
    // Row by row, so that what is subtracted stays in the operand cache: beside a wgmma register reads seem to count.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 2 * r; i < kSize; i += 4) {
        s[i] = fmaf(s[i], scale_log2, -shifted_by[r]);
        s[i + 1] = fmaf(s[i + 1], scale_log2, -shifted_by[r]);
        const int32_t a = __float_as_int(s[i]), b = __float_as_int(s[i + 1]);
        peak = kSignTells ? peak & a & b : max(max(a, b), peak);
      }
    }
    return peak >= __float_as_int(kLimit) || !has_reference(0) || !has_reference(1);
  }

  // Raises the references of rows whose exponents reach the limit, or gives them their first, and rescales `o`, the
  // products with earlier weights. Exactly nothing for the others.
  template <int kSize, int kOutputs>
  __device__ __forceinline__ void raise(float (&s)[kSize], float (&o)[kOutputs]) {
    float by[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = row_maximum(s, r);
      const bool rises = has_reference(r) ? __float_as_int(top) >= __float_as_int(kLimit) : top != -INFINITY;
      const float before = base(r), raised = before + (top + kAbove);
      by[r] = rises ? raised - before : 0.0f;  // as it was rounded: for earlier weights and for these
      factor[r] = has_reference(r) ? exp2_approx(-by[r]) : 1.0f;  // of nothing
      if (rises) reference[r] = raised;
      sum[r] = __fmul_rn(sum[r], factor[r]);  // the same bits wherever it is inlined
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) s[i] -= by[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // Turns the exponents of `count` blocks of 8 columns from `begin` on into weights.
  template <int kSize>
  __device__ __forceinline__ void weigh(float (&s)[kSize], int begin, int count) {
#pragma unroll
    for (int i = 4 * begin; i < 4 * (begin + count); i += 2) {
      s[i] = exp2_approx(s[i]);
      s[i + 1] = exp2_approx(s[i + 1]);
      sum[i / 2 % 2] += s[i] + s[i + 1];
    }
  }

  // The sum of a row's weights, 0 where the row saw no key; the quad's lanes all ask.
  __device__ __forceinline__ float total(int r) const {
    const float half = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
    return half + __shfl_xor_sync(~0u, half, 2);
  }

  // Natural log of the sum of exp(logit). Of a row that saw no key -inf, as the logarithm of 0 is.
  __device__ __forceinline__ float lse(int r, float total) const {
    // In units of what a key weighs that set the reference: of that one alone the logarithm is exactly 0.
    constexpr float kUnit = kSignTells ? 256.0f : 1.0f;  // 2^kAbove
    return (reference[r] - kAbove + log2_approx(total * kUnit)) * kLn2;
  }

 private:
  __device__ __forceinline__ bool has_reference(int r) const { return reference[r] != kNoReference; }

  __device__ __forceinline__ float base(int r) const { return has_reference(r) ? reference[r] : 0.0f; }

  // Of the quad's columns, in four chains: where it is asked for, nothing hides its latency.
  template <int kSize>
  __device__ __forceinline__ static float row_maximum(const float (&s)[kSize], int r) {
    float chain[4];
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const float score = s[i / 2 * 4 + 2 * r + i % 2];
      chain[i % 4] = i < 4 ? score : fmaxf(chain[i % 4], score);
    }
    float top = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }
};

}  // namespace mla_prefill
