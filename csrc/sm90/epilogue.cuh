// From accumulators to out and lse, merged into the running state where asked for.
#pragma once

#include "params.h"
#include "sm90/config.h"
#include "sm90/ptx.h"
#include "sm90/softmax.cuh"

namespace mla_prefill::sm90 {

// How a row enters out: out = own * o + running * out.
struct RowWeights {
  float own, running;
  bool store;
};

// Weights of a finished row; writes its lse. Called by whole warps; the first lane of a quad reads and writes for it.
__device__ __forceinline__ RowWeights finish_row(const PrefillParams& p, int64_t row, int head, float sum, float lse,
                                                 bool valid) {
  RowWeights weights = {sum == 0.0f ? 0.0f : 1.0f / sum, 0.0f, valid};
  if (p.lse.data == nullptr) return weights;
  float* at = p.lse.data + head * p.lse.head_stride + row * p.lse.row_stride;
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

// 4 x 4 transpose of 32-bit words among the lanes of a quad.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  uint32_t a = odd ? x[0] : x[1], b = odd ? x[2] : x[3];
  a = __shfl_xor_sync(~0u, a, 1);
  b = __shfl_xor_sync(~0u, b, 1);
  odd ? (x[0] = a, x[2] = b) : (x[1] = a, x[3] = b);
  uint32_t c = high ? x[0] : x[2], d = high ? x[1] : x[3];
  c = __shfl_xor_sync(~0u, c, 2);
  d = __shfl_xor_sync(~0u, d, 2);
  high ? (x[0] = c, x[1] = d) : (x[2] = c, x[3] = d);
}

template <typename T>
__device__ __forceinline__ void write_tile(const PrefillParams& p, const Tile& tile, int first_row, int thread,
                                           float (&o)[kHeadDimV / 2], const RowSums& sums) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_in_tile = first_row + fragment_row(thread) + 8 * r;
    const int64_t row = (int64_t)tile.q_row + row_in_tile;
    const RowWeights w = finish_row(p, row, tile.head, sums.sum[r], sums.lse[r], row_in_tile < tile.q_rows);
    T* out = static_cast<T*>(p.out.data) + row * p.out.row_stride + tile.head * p.out.head_stride + thread % 4 * 8;
    // Groups of 32 columns: the quad exchanges its pairs so that each lane holds 8 columns in a row, 16 bytes.
#pragma unroll
    for (int group = 0; group < kHeadDimV / 32; ++group) {
      uint4* at = reinterpret_cast<uint4*>(out + group * 32);
      uint32_t x[4];
      if (p.accumulate) {
        const uint4 held = w.store && w.running != 0.0f ? *at : make_uint4(0, 0, 0, 0);
        uint32_t running[4] = {held.x, held.y, held.z, held.w};
        transpose_quad(running);  // its own inverse: now as the accumulators lie
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int from = (group * 4 + i) * 4 + 2 * r;
          const float2 pair = unpack<T>(running[i]);
          x[i] = pack<T>(fmaf(w.running, pair.x, o[from] * w.own), fmaf(w.running, pair.y, o[from + 1] * w.own));
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int from = (group * 4 + i) * 4 + 2 * r;
          x[i] = pack<T>(o[from] * w.own, o[from + 1] * w.own);
        }
      }
      transpose_quad(x);
      if (w.store) *at = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}

// (0, -inf) for rows of a sequence without keys; a live running state stays as it is. All lanes of one warp.
template <typename T>
__device__ __forceinline__ void write_empty_rows(const PrefillParams& p, int64_t first_row, int32_t rows,
                                                 int head_begin, int head_count) {
  const int lane = threadIdx.x % 32;
  for (int head = head_begin; head < head_begin + head_count; ++head) {
    for (int64_t row = first_row; row < first_row + rows; ++row) {
      float* lse = p.lse.data ? p.lse.data + head * p.lse.head_stride + row * p.lse.row_stride : nullptr;
      if (p.accumulate && !isinf(*lse)) continue;
      __syncwarp();
      T* out = static_cast<T*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride;
      *reinterpret_cast<uint2*>(out + lane * 4) = make_uint2(0, 0);
      if (lane == 0 && lse) *lse = -INFINITY;
    }
  }
}

}  // namespace mla_prefill::sm90
