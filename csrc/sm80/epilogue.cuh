// From accumulators to out and lse, merged into the running state where asked for.
#pragma once

#include "params.h"
#include "sm80/layout.h"
#include "sm80/ptx.h"
#include "sm80/softmax.cuh"

namespace mla_prefill::sm80 {

// How a row enters out: out = own * o + running * out.
struct RowWeights {
  float own, running;
  bool store;
};

// Weights of a finished row; writes its lse. Called by whole warps; the first lane of a quad reads and writes for it.
__device__ __forceinline__ RowWeights finish_row(const PrefillParams& p, int64_t row, int head, float sum, float lse,
                                                 bool valid) {
  RowWeights weights = {sum == 0.0f ? 0.0f : __fdividef(1.0f, sum), 0.0f, valid};
  if (p.lse.data == nullptr) return weights;
  float* const at = p.lse.data + head * p.lse.head_stride + row * p.lse.row_stride;
  const bool first_lane = threadIdx.x % 4 == 0;
  if (p.accumulate) {
    float running_lse = first_lane && valid ? *at : 0.0f;
    running_lse = __shfl_sync(~0u, running_lse, 0, 4);
    if (!isinf(running_lse)) {               // +inf and -inf both mark an empty state, whatever out holds
      weights.store = valid && sum != 0.0f;  // a row without keys leaves a live state as it is
      const float top = fmaxf(running_lse, lse);
      const float running = exp2_approx((running_lse - top) * kLog2E);
      const float added = exp2_approx((lse - top) * kLog2E);
      const float total = running + added;
      weights.running = running / total;
      weights.own *= added / total;
      lse = top + __logf(total);
    }
  }
  if (first_lane && weights.store) *at = lse;
  return weights;
}

// A lane holds one word (two columns) of each of two neighbouring blocks of 8 columns. Afterwards an even lane holds
// its word and the next lane's of the first block, an odd lane the lane's before and its own of the second: 8 bytes in
// a row, 32 of a quad. It is its own inverse.
__device__ __forceinline__ void exchange_words(uint32_t& first, uint32_t& second) {
  const bool odd = threadIdx.x & 1;
  const uint32_t received = __shfl_xor_sync(~0u, odd ? first : second, 1);
  (odd ? first : second) = received;
}

// 4 elements of a row of out. `aligned`: out's base and strides are multiples of 8 bytes.
__device__ __forceinline__ uint2 load_4(const uint16_t* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const uint2*>(from);
  return make_uint2(from[0] | (uint32_t)from[1] << 16, from[2] | (uint32_t)from[3] << 16);
}

__device__ __forceinline__ void store_4(uint16_t* to, uint2 values, bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint2*>(to) = values;
  } else {
    to[0] = (uint16_t)values.x;
    to[1] = (uint16_t)(values.x >> 16);
    to[2] = (uint16_t)values.y;
    to[3] = (uint16_t)(values.y >> 16);
  }
}

// Writes the row of which a lane holds registers 2 r and 2 r + 1 of each n8 block of `o`.
template <typename T, int kBlocks>
__device__ __forceinline__ void write_row(const PrefillParams& p, int64_t row, int head, const float (&o)[kBlocks][4],
                                          int r, const RowWeights& w, bool aligned) {
  const int32_t lane_column = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;  // see exchange_words
  uint16_t* const out =
      static_cast<uint16_t*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride + lane_column;
#pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    const bool inside = lane_column + n * 8 < p.dim_v;
    const float *first = o[n] + 2 * r, *second = o[n + 1] + 2 * r;
    float2 a = make_float2(first[0] * w.own, first[1] * w.own), b = make_float2(second[0] * w.own, second[1] * w.own);
    if (p.accumulate) {
      uint2 held = make_uint2(0, 0);
      if (inside && w.store && w.running != 0.0f) held = load_4(out + n * 8, aligned);
      exchange_words(held.x, held.y);
      const float2 held_a = unpack<T>(held.x), held_b = unpack<T>(held.y);
      a = make_float2(fmaf(w.running, held_a.x, a.x), fmaf(w.running, held_a.y, a.y));
      b = make_float2(fmaf(w.running, held_b.x, b.x), fmaf(w.running, held_b.y, b.y));
    }
    uint2 packed = make_uint2(pack<T>(a.x, a.y), pack<T>(b.x, b.y));
    exchange_words(packed.x, packed.y);
    if (inside && w.store) store_4(out + n * 8, packed, aligned);
  }
}

}  // namespace mla_prefill::sm80
