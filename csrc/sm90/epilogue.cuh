// From accumulators to out and lse, merged into the running state where asked for.
#pragma once

#include "cuda_rows.cuh"
#include "params.h"
#include "sm90/config.h"
#include "sm90/ptx.h"

namespace mla_prefill::sm90 {

// The first of a thread's two rows in a warpgroup's accumulator; the other one is 8 rows on.
__device__ __forceinline__ int fragment_row(int thread) { return thread / 32 * 16 + thread % 32 / 4; }

struct RowSums {
  float sum[2];  // of a row's weights, 0 where it saw no key
  float lse[2];  // natural log of the sum of exp(logit), -inf where it saw no key
};

template <typename T, bool kAccumulate, int kSize>
__device__ __forceinline__ void write_rows(const PrefillParams& p, const Tile& tile, int first_row, int thread,
                                           const float (&o)[kSize], const RowSums& sums) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_in_tile = first_row + fragment_row(thread) + 8 * r;
    const int64_t row = (int64_t)tile.q_row + row_in_tile;
    RowWeights w = weights_of_row(sums.sum[r], sums.lse[r], row_in_tile < tile.q_rows);
    float* const lse = lse_of_row(p, row, tile.head);
    if (kAccumulate) merge_with_running(w, sums.sum[r], lse);
    if (kAccumulate || p.lse.data) store_lse(w, lse);
    T* out = static_cast<T*>(p.out.data) + row * p.out.row_stride + tile.head * p.out.head_stride + thread % 2 * 8 +
             thread % 4 / 2 * 4;
#pragma unroll
    for (int block = 0; block < kSize / 4; block += 2) {
      if (kSize > 64 && block % 4 == 0) __syncwarp();  // or more is on its way than there are registers for
      uint2* at = reinterpret_cast<uint2*>(out + block * 8);
      const float *first = o + block * 4 + 2 * r, *second = first + 4;
      uint2 x;
      if (kAccumulate) {
        uint2 held = w.store && w.running != 0.0f ? *at : make_uint2(0, 0);
        exchange_words(held.x, held.y);
        const float2 a = unpack<T>(held.x), b = unpack<T>(held.y);
        x.x = pack<T>(fmaf(w.running, a.x, first[0] * w.own), fmaf(w.running, a.y, first[1] * w.own));
        x.y = pack<T>(fmaf(w.running, b.x, second[0] * w.own), fmaf(w.running, b.y, second[1] * w.own));
      } else {
        x.x = pack<T>(first[0] * w.own, first[1] * w.own);
        x.y = pack<T>(second[0] * w.own, second[1] * w.own);
      }
      exchange_words(x.x, x.y);
      if (w.store) *at = x;
    }
  }
}

template <typename T, int kSize>
__device__ __forceinline__ void write_tile(const PrefillParams& p, const Tile& tile, int first_row, int thread,
                                           const float (&o)[kSize], const RowSums& sums) {
  if (p.accumulate) {
    write_rows<T, true>(p, tile, first_row, thread, o, sums);
  } else {
    write_rows<T, false>(p, tile, first_row, thread, o, sums);
  }
}

// How a thread's two rows enter out.
__device__ __forceinline__ void finish_rows(const PrefillParams& p, const Tile& tile, int first_row, int thread,
                                            const RowSums& sums, RowWeights (&weights)[2]) {
  const int row = first_row + fragment_row(thread);
#pragma unroll
  for (int r = 0; r < 2; ++r) weights[r] = weights_of_row(sums.sum[r], sums.lse[r], row + 8 * r < tile.q_rows);
  if (p.accumulate) {
    const float* const lse = lse_of_row(p, (int64_t)tile.q_row + row, tile.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) merge_with_running(weights[r], sums.sum[r], lse + 8 * r * p.lse.row_stride);
  }
}

__device__ __forceinline__ void store_lse_of_rows(const PrefillParams& p, const Tile& tile, int first_row, int thread,
                                                  const RowWeights (&weights)[2]) {
  if (p.lse.data == nullptr) return;
  float* const lse = lse_of_row(p, (int64_t)tile.q_row + first_row + fragment_row(thread), tile.head);
#pragma unroll
  for (int r = 0; r < 2; ++r) store_lse(weights[r], lse + 8 * r * p.lse.row_stride);
}

// Puts finished rows of a warpgroup in shared memory, in place of what they are merged into. They are boxes of 64
// columns with 128-byte swizzle.
template <typename T, bool kAccumulate, int kSize>
__device__ __forceinline__ void stage_rows(uint32_t boxes, int thread, const float (&o)[kSize],
                                           const RowWeights (&weights)[2]) {
  // Matrices are the warp's first and last eight rows of a block of 8 columns, then of the next block.
  const int lane = thread % 32, row = thread / 32 * 16 + lane % 16, chunk = lane / 16 ^ lane % 8;
  const uint32_t rows = boxes + row * kBoxColumns * sizeof(T);
#pragma unroll
  for (int block = 0; block < kSize / 4; block += 2) {
    const uint32_t at = rows + block / 8 * kRowsBoxBytes<T> + ((block % 8 ^ chunk) << 4);
    uint32_t x[4];
    if (kAccumulate) load_matrices(x, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowWeights& w = weights[i % 2];
      const float* own = o + block * 4 + 2 * i;
      if (!kAccumulate) {
        x[i] = pack<T>(own[0] * w.own, own[1] * w.own);
      } else if (w.store) {
        const float2 held = unpack<T>(w.running != 0.0f ? x[i] : 0);  // of a dead state it may be anything
        x[i] = pack<T>(fmaf(w.running, held.x, own[0] * w.own), fmaf(w.running, held.y, own[1] * w.own));
      }
    }
    store_matrices(at, x);
  }
}

// (0, -inf) for rows of a sequence without keys; a live running state stays as it is. All lanes of one warp.
template <typename T, int kHeadDimV>
__device__ __forceinline__ void write_empty_rows(const PrefillParams& p, int64_t first_row, int32_t rows,
                                                 int head_begin, int head_count) {
  const int lane = threadIdx.x % 32;
  for (int head = head_begin; head < head_begin + head_count; ++head) {
    for (int64_t row = first_row; row < first_row + rows; ++row) {
      float* lse = p.lse.data ? lse_of_row(p, row, head) : nullptr;
      if (p.accumulate && !isinf(*lse)) continue;
      __syncwarp();
      T* out = static_cast<T*>(p.out.data) + row * p.out.row_stride + head * p.out.head_stride;
#pragma unroll
      for (int column = 0; column < kHeadDimV; column += 128) {
        *reinterpret_cast<uint2*>(out + column + lane * 4) = make_uint2(0, 0);
      }
      if (lane == 0 && lse) *lse = -INFINITY;
    }
  }
}

}  // namespace mla_prefill::sm90
