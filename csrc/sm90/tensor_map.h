// Ragged TMA maps: loads that stop at the end of a sequence, without a map per sequence.
//
// A tensor [rows, heads, columns] is described with five dimensions {column, head, x, y, z} of strides
// {1, head, row, row, 2^34 bytes - row}. A load of rows from first_row + r on, for a sequence of `size` rows, gives
//   x = 2^30 - size + r,  y = first_row + size,  z = 2^30,
// so that row * (x + y - z) + 2^30 * 2^34 bytes = row * (first_row + r) modulo 2^64: the right address. The bound of x
// is 2^30, so rows from `size` on are out of bounds: not read, and zero in shared memory. (Technique: the ragged tensor
// descriptors of Triton.)
#pragma once

#include <cuda.h>

#include <cstdint>

#include "params.h"

namespace mla_prefill::sm90 {

constexpr int32_t kRaggedOrigin = 1 << 30;

// A map of boxes of box_rows x 64 columns for 16-bit elements. False where the driver refuses it.
bool make_ragged_map(CUtensorMap* map, const ConstRows& tensor, DType dtype, int columns, int heads, int box_rows);

// Whether such a map can describe the tensor: base and strides are multiples of 16 bytes, strides below 2^34.
bool fits_ragged_map(const ConstRows& tensor, int64_t rows, int64_t heads);

}  // namespace mla_prefill::sm90
