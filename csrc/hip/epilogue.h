// From accumulators to out and lse, merged into the running state where asked for.
#pragma once

#include "hip/config.h"
#include "hip/gcn.h"
#include "hip/softmax.h"
#include "params.h"

namespace mla_prefill::hip {

// How a row enters out: out = own * o + running * out.
struct RowWeights {
  float own, running;
  bool store;
};

// Weights of a finished row, whose two lanes both ask. `sum` is 0 and `lse` -inf where the row saw no key.
__device__ __forceinline__ RowWeights finish_row(const PrefillParams& p, const float* running, float sum, float& lse) {
  RowWeights weights = {sum == 0.0f ? 0.0f : reciprocal(sum), 0.0f, true};
  if (!p.accumulate) return weights;
  const float running_lse = *running;
  if (__builtin_isinf(running_lse)) return weights;  // +inf and -inf both mark an empty state, whatever out holds
  weights.store = sum != 0.0f;                       // a row without keys leaves a live state as it is
  const float top = __builtin_fmaxf(running_lse, lse);
  const float kept = exp2_approx((running_lse - top) * kLog2E);
  const float added = exp2_approx((lse - top) * kLog2E);
  weights.running = kept * reciprocal(kept + added);
  weights.own *= added * reciprocal(kept + added);
  lse = top + log2_approx(kept + added) * kLn2;
  return weights;
}

// Writes one row of one head: a lane has 4 columns of every 8, lane ^ 32 the others.
template <typename T>
__device__ __forceinline__ void write_row(const PrefillParams& p, int64_t row, int head, int half,
                                          const f32x16 (&o)[kBlocksV], float sum, float lse) {
  float* const at = p.lse.data ? p.lse.data + head * p.lse.head_stride + row * p.lse.row_stride : nullptr;
  const RowWeights w = finish_row(p, at, sum, lse);
  if (!w.store) return;
  if (at && half == 0) *at = lse;
  T* const out = static_cast<T*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride + 4 * half;
#pragma unroll
  for (int block = 0; block < kBlocksV; ++block) {
#pragma unroll
    for (int g = 0; g < 16; g += 4) {
      u32x2* const to = reinterpret_cast<u32x2*>(out + block * 32 + 2 * g);
      f32x2 low = {o[block][g], o[block][g + 1]}, high = {o[block][g + 2], o[block][g + 3]};
      low *= w.own;
      high *= w.own;
      if (w.running != 0.0f) {
        const u32x2 held = *to;
        low += unpack<T>(held.x) * w.running;
        high += unpack<T>(held.y) * w.running;
      }
      *to = {pack<T>(low), pack<T>(high)};
    }
  }
}

}  // namespace mla_prefill::hip
