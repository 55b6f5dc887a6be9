// Where elements lie: in shared memory, and in the registers of a warp. Plain functions of rows, columns and lanes,
// which tests/cpp/test_sm80.cpp checks against the instructions' definitions (PTX ISA, "Matrix multiply-accumulate
// operation using mma instruction" and "ldmatrix").
#pragma once

#include <cstdint>

#include "host_device.h"

namespace mla_prefill::sm80 {

// Shared memory holds rows of 16-byte chunks: 8 elements, one row of an 8 x 8 matrix for ldmatrix.
constexpr int kChunkElements = 8;
constexpr int kChunkBytes = 16;

// A tile of rows x kColumns elements. The chunks of a row are permuted in groups, by an exclusive or with a number that
// depends on the row: the chunks of one column in 8 consecutive rows then cover all 32 banks, so that neither ldmatrix
// nor the copies into a row have bank conflicts.
template <int kColumns_>
struct TileLayout {
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kRowChunks = kColumns / kChunkElements;
  static constexpr int kGroupChunks = kColumns % 64 == 0 ? 8 : 4;
  static constexpr int kGroups = kRowChunks / kGroupChunks;
  static_assert(kColumns % 32 == 0, "whole groups of at least four chunks");

  // Rows of whole 128-byte lines all begin in bank 0. Otherwise rows are an odd number of half lines, and every other
  // one begins in bank 16.
  MLA_HOST_DEVICE static constexpr int permutation(int row) { return kGroupChunks == 8 ? row & 7 : row >> 1 & 3; }

  MLA_HOST_DEVICE static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ permutation(row)) * kChunkBytes;
  }

  // The offset of chunk `2 step + c` in the row of which `offset` is that of chunk c, c < 2: steps inside a group
  // differ in bits of their own, so that an address takes one exclusive or, and groups are constant distances.
  static constexpr int kGroupSteps = kGroupChunks / 2;
  MLA_HOST_DEVICE static constexpr int at_step(int offset, int step) {
    return (offset ^ step % kGroupSteps * 2 * kChunkBytes) + step / kGroupSteps * kGroupChunks * kChunkBytes;
  }
};

// ---- ldmatrix.x4: lane l passes the address of row l % 8 of matrix l / 8 --------------------------------------------

struct MatrixRow {
  int row, chunk;  // of a 16 x 16 block
};

// The block as operand A of m16n8k16 (Q: its rows are the product's), or, with .trans, as two operands B (V: its rows
// are what the product sums over, its columns 0 to 7 and 8 to 15 the two operands').
MLA_HOST_DEVICE constexpr MatrixRow row_by_row(int lane) { return {lane % 16, lane / 16}; }

// The block as two operands B (K: its rows are the product's columns, 0 to 7 and 8 to 15 the two operands').
MLA_HOST_DEVICE constexpr MatrixRow column_by_column(int lane) { return {lane / 16 * 8 + lane % 8, lane / 8 % 2}; }

// ---- Accumulators of m16n8k16 ---------------------------------------------------------------------------------------

// Register i of a lane. Two neighbouring n8 blocks of S, packed, are operand A of the next product: registers 0, 1 of
// the first, 2, 3 of the first, 0, 1 of the second, 2, 3 of the second.
MLA_HOST_DEVICE constexpr int accumulator_row(int lane, int i) { return lane / 4 + i / 2 * 8; }
MLA_HOST_DEVICE constexpr int accumulator_column(int lane, int i) { return lane % 4 * 2 + i % 2; }

}  // namespace mla_prefill::sm80
