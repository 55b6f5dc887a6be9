// Copies of rows of one head from device memory into a tile in shared memory.
#pragma once

#include "sm80/layout.h"
#include "sm80/ptx.h"
#include "sm80/rows.h"

namespace mla_prefill::sm80 {

// All threads of a CTA copy a tile together. Rows of the tile are those of `left` followed by those of `right`; columns
// past them, and rows from `rows` on, are not read and become zeros.
template <int kRows, int kColumns, int kThreads>
struct TileCopy {
  using Layout = TileLayout<kColumns>;
  using Share = CopyShare<kRows, kColumns, kThreads>;

  // `in_chunks`: rows can be read in 16-byte chunks.
  __device__ __forceinline__ static void copy(uint32_t to, const RowSource& left, const RowSource& right, int32_t rows,
                                              bool in_chunks) {
    if (in_chunks) {
      copy_chunks(to, left, right, rows);
    } else {
      copy_elements(to, left, right, rows);
    }
  }

 private:
  // Asynchronous: complete after wait_for_copies() and a barrier.
  __device__ __forceinline__ static void copy_chunks(uint32_t to, const RowSource& left, const RowSource& right,
                                                     int32_t rows) {
    const Share share(computed_here(threadIdx.x));
    const uint32_t at = to + share.offset();
    const int32_t end = left.columns + right.columns;
    const uint16_t* const from_left = left.data + share.row * left.row_stride + share.column;
    const uint16_t* const from_right = right.data + share.row * right.row_stride + share.column - left.columns;
#pragma unroll
    for (int group = 0; group < Layout::kGroups; ++group) {
      const int32_t column = share.column + group * Share::kGroupColumns;
      const bool in_left = column < left.columns, inside = column < end;
      const uint16_t* from = (in_left ? from_left : from_right) + group * Share::kGroupColumns;
      const int64_t step = (in_left ? left.row_stride : right.row_stride) * Share::kRowsAtOnce;
#pragma unroll
      for (int round = 0; round < Share::kRounds; ++round) {
        copy_16_async(at + round * Share::kRoundBytes + group * Share::kGroupBytes, from,
                      inside && round * Share::kRowsAtOnce + share.row < rows ? kChunkBytes : 0);
        from += step;
      }
    }
  }

  // Whatever the alignment, element by element. Complete after a barrier.
  __device__ __forceinline__ static void copy_elements(uint32_t to, const RowSource& left, const RowSource& right,
                                                       int32_t rows) {
#pragma unroll 1
    for (int index = threadIdx.x; index < kRows * Layout::kRowChunks; index += kThreads) {
      const int row = index / Layout::kRowChunks, chunk = index % Layout::kRowChunks;
      const int32_t column = chunk * kChunkElements;
      const bool in_left = column < left.columns;
      const uint16_t* const from = in_left ? left.data + row * left.row_stride + column
                                           : right.data + row * right.row_stride + column - left.columns;
      uint32_t words[4] = {};
      if (row < rows && column < left.columns + right.columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
      }
      store_16(to + Layout::offset(row, chunk), make_uint4(words[0], words[1], words[2], words[3]));
    }
    __syncwarp();  // ldmatrix and mma, which may follow, want the warp together
  }
};

// A round of a whole tile, to be issued beside other work.
template <typename Whole>
__device__ __forceinline__ void copy_round(Whole& copy) {
  copy.copy_round([](uint32_t to, const uint16_t* from) { copy_16_async(to, from); });
}

template <typename Whole>
__device__ __forceinline__ void copy_all(Whole copy) {
#pragma unroll
  for (int round = 0; round < Whole::kRounds; ++round) copy_round(copy);
}

}  // namespace mla_prefill::sm80
