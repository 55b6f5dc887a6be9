// Rows of one head in device memory, and how the threads of a CTA share the copy of a tile of them. Plain C++, which
// tests/cpp/test_sm80.cpp runs thread by thread.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "params.h"
#include "sm80/layout.h"

namespace mla_prefill::sm80 {

// Consecutive rows of one head, or one of the two parts of them: its columns [0, columns).
struct RowSource {
  const uint16_t* data;  // row 0
  int64_t row_stride;
  int32_t columns;  // a multiple of 8, maybe 0
};

MLA_HOST_DEVICE const uint16_t* row_of(const ConstRows& tensor, int64_t row, int64_t head) {
  return static_cast<const uint16_t*>(tensor.data) + row * tensor.row_stride + head * tensor.head_stride;
}

MLA_HOST_DEVICE RowSource rows_from(const uint16_t* data, int64_t row_stride, int32_t row, int32_t columns) {
  return {data + row * row_stride, row_stride, columns};
}

// A tile is copied in rounds of kRowsAtOnce rows: in each, a thread has one chunk of each group of columns of a row.
template <int kRows, int kColumns, int kThreads>
struct CopyShare {
  using Layout = TileLayout<kColumns>;
  static constexpr int kGroupColumns = Layout::kGroupChunks * kChunkElements;
  static constexpr int kRowsAtOnce = kThreads / Layout::kGroupChunks;
  static constexpr int kRounds = kRows / kRowsAtOnce;
  static constexpr int kRoundBytes = kRowsAtOnce * Layout::kRowBytes, kGroupBytes = kGroupColumns * 2;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0, "a thread's rows are all permuted alike");

  int row, column;  // of the thread's first chunk: round 0, group 0

  MLA_HOST_DEVICE explicit CopyShare(uint32_t thread)
      : row((int)(thread / Layout::kGroupChunks)), column((int)(thread % Layout::kGroupChunks) * kChunkElements) {}

  // Where that chunk lies in the tile. The others are multiples of kRoundBytes and kGroupBytes away.
  MLA_HOST_DEVICE int offset() const { return Layout::offset(row, column / kChunkElements); }
};

// Rows of a whole tile. Their stride has 32 bits, so that an address takes one multiply-add.
struct WholeRows {
  const uint16_t* data;  // row 0
  int32_t row_stride;
};

// A thread's share of a tile whose rows and columns are all there, from sources that can be read in chunks: no chunk
// asks whether it is inside, and pointers run from round to round. Columns from kLeftColumns on are those of `right`.
template <int kRows, int kColumns, int kThreads, int kLeftColumns = kColumns>
struct WholeCopy {
  using Share = CopyShare<kRows, kColumns, kThreads>;
  static constexpr int kRounds = Share::kRounds;
  static_assert(kLeftColumns % Share::kGroupColumns == 0, "a group comes from one source");

  uint32_t to;
  const uint16_t *left, *right;
  int32_t left_stride, right_stride;

  // Of the tile at `tile_address` from rows `first_row` on.
  MLA_HOST_DEVICE WholeCopy(uint32_t thread, uint32_t tile_address, const WholeRows& left_rows,
                            const WholeRows& right_rows, int32_t first_row)
      : left_stride(left_rows.row_stride), right_stride(right_rows.row_stride) {
    const Share share(thread);
    const int32_t row = first_row + share.row;
    to = tile_address + share.offset();
    left = left_rows.data + (int64_t)row * left_stride + share.column;
    right = right_rows.data + (int64_t)row * right_stride + share.column;
  }

  // Calls copy(to, from) for the thread's chunks of the next round.
  template <typename Copy>
  MLA_HOST_DEVICE void copy_round(Copy copy) {
    for (int column = 0; column < kColumns; column += Share::kGroupColumns) {
      copy(to + column * 2, column < kLeftColumns ? left + column : right + (column - kLeftColumns));
    }
    to += Share::kRoundBytes;
    left += (int64_t)left_stride * Share::kRowsAtOnce;
    right += (int64_t)right_stride * Share::kRowsAtOnce;
  }
};

}  // namespace mla_prefill::sm80
