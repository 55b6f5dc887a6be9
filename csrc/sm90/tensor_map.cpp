#include "sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <array>

namespace mla_prefill::sm90 {
namespace {

constexpr int64_t kElementBytes = 2;

// From the driver that is loaded, so that nothing links against libcuda.
PFN_cuTensorMapEncodeTiled_v12000 encode_tiled() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
    return status == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found) : nullptr;
  }();
  return function;
}

// All that a map depends on.
struct Key {
  const void* data;
  int64_t row_stride, head_stride;
  int32_t columns, heads, box_rows;
  DType dtype;

  bool operator==(const Key& other) const {
    return data == other.data && row_stride == other.row_stride && head_stride == other.head_stride &&
           columns == other.columns && heads == other.heads && box_rows == other.box_rows && dtype == other.dtype;
  }
  size_t hash() const { return (reinterpret_cast<uintptr_t>(data) >> 8) * 31 + (size_t)box_rows * 7 + (size_t)columns; }
};

bool encode(CUtensorMap* map, const Key& key) {
  // The stride of a dimension of one element is free: any value that the driver takes.
  const auto bytes = [](int64_t stride) { return stride % 8 == 0 ? (cuuint64_t)(stride * kElementBytes) : 16; };
  const cuuint64_t row = bytes(key.row_stride);
  constexpr cuuint64_t kUnbounded = 0x7fff0000;
  const cuuint64_t sizes[5] = {(cuuint64_t)key.columns, (cuuint64_t)key.heads, (cuuint64_t)kRaggedOrigin, kUnbounded,
                               kUnbounded};
  const cuuint64_t strides[4] = {bytes(key.head_stride), row, row, ((cuuint64_t)1 << 34) - row};
  const cuuint32_t box[5] = {64, 1, (cuuint32_t)key.box_rows, 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      key.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto encode_function = encode_tiled();
  return encode_function &&
         encode_function(map, type, 5, const_cast<void*>(key.data), sizes, strides, box, element_strides,
                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool fits_ragged_map(const ConstRows& tensor, int64_t rows, int64_t heads) {
  const auto fits = [](int64_t stride, int64_t size) {
    const int64_t bytes = stride * kElementBytes;
    return size <= 1 || (bytes >= 0 && bytes % 16 == 0 && bytes < (int64_t)1 << 34);
  };
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && fits(tensor.row_stride, rows) &&
         fits(tensor.head_stride, heads);
}

bool make_ragged_map(CUtensorMap* map, const ConstRows& tensor, DType dtype, int columns, int heads, int box_rows) {
  // The driver takes 1.3 us for a map, more than half of a call for all of them, and an engine's buffers come back at
  // the same addresses step after step. A map holds nothing but its key, so an entry never goes stale.
  struct Entry {
    Key key;
    CUtensorMap map;
  };
  static thread_local std::array<Entry, 128> cache{};
  const Key key = {tensor.data, tensor.row_stride, tensor.head_stride, columns, heads, box_rows, dtype};
  Entry& entry = cache[key.hash() % cache.size()];
  if (!(entry.key == key)) {
    entry.key = {};
    if (!encode(&entry.map, key)) return false;
    entry.key = key;
  }
  *map = entry.map;
  return true;
}

}  // namespace mla_prefill::sm90
