// Copies of rows of one head from device memory into a tile in shared memory.
#pragma once

#include "params.h"
#include "sm80/layout.h"
#include "sm80/ptx.h"

namespace mla_prefill::sm80 {

// Consecutive rows of one head, or one of the two parts of them: its columns [0, columns).
struct RowSource {
  const uint16_t* data;  // row 0
  int64_t row_stride;
  int32_t columns;  // a multiple of 8, maybe 0
};

__device__ __forceinline__ RowSource rows_of(const ConstRows& tensor, int64_t row, int64_t head, int32_t columns) {
  return {static_cast<const uint16_t*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride,
          tensor.row_stride, columns};
}

// All threads of a CTA copy a tile together: a thread one chunk of each group of columns of every kRowsAtOnce-th row.
// Rows of the tile are those of `left` followed by those of `right`; columns past them, and rows from `rows` on, are
// not read and become zeros.
template <int kRows, int kColumns, int kThreads>
struct TileCopy {
  using Layout = TileLayout<kColumns>;
  static constexpr int kRowsAtOnce = kThreads / Layout::kGroupChunks;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0, "a thread's rows are all permuted alike");

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
    const uint32_t thread = computed_here(threadIdx.x);
    const int row = (int)(thread / Layout::kGroupChunks), chunk = (int)(thread % Layout::kGroupChunks);
    const uint32_t at = to + Layout::offset(row, chunk);
    const int32_t column = chunk * kChunkElements, end = left.columns + right.columns;
    const uint16_t* const from_left = left.data + row * left.row_stride + column;
    const uint16_t* const from_right = right.data + row * right.row_stride + column - left.columns;
#pragma unroll
    for (int group = 0; group < Layout::kGroups; ++group) {
      constexpr int kGroupColumns = Layout::kGroupChunks * kChunkElements;
      const bool in_left = column + group * kGroupColumns < left.columns;
      const bool inside = column + group * kGroupColumns < end;
      const uint16_t* from = (in_left ? from_left : from_right) + group * kGroupColumns;
      const int64_t step = (in_left ? left.row_stride : right.row_stride) * kRowsAtOnce;
#pragma unroll
      for (int first = 0; first < kRows; first += kRowsAtOnce) {
        copy_16_async(at + first * Layout::kRowBytes + group * Layout::kGroupChunks * kChunkBytes, from,
                      inside && first + row < rows ? kChunkBytes : 0);
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

}  // namespace mla_prefill::sm80
