// From accumulators to out and lse, merged into the running state where asked for.
#pragma once

#include "cuda_rows.cuh"
#include "params.h"
#include "sm80/layout.h"
#include "sm80/ptx.h"

namespace mla_prefill::sm80 {

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
template <typename T, int kSize>
__device__ __forceinline__ void write_row(const PrefillParams& p, int64_t row, int head, const float (&o)[kSize], int r,
                                          const RowWeights& w, bool aligned) {
  const int32_t lane_column = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;  // see exchange_words
  uint16_t* const out =
      static_cast<uint16_t*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride + lane_column;
#pragma unroll
  for (int n = 0; n < kSize / 4; n += 2) {
    const bool inside = lane_column + n * 8 < p.dim_v;
    const float *first = o + 4 * n + 2 * r, *second = first + 4;
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
