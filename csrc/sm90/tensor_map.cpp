#include "sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

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
  // The stride of a dimension of one element is free: any value that the driver takes.
  const auto bytes = [](int64_t stride) { return stride % 8 == 0 ? (cuuint64_t)(stride * kElementBytes) : 16; };
  const cuuint64_t row = bytes(tensor.row_stride);
  constexpr cuuint64_t kUnbounded = 0x7fff0000;
  const cuuint64_t sizes[5] = {(cuuint64_t)columns, (cuuint64_t)heads, (cuuint64_t)kRaggedOrigin, kUnbounded,
                               kUnbounded};
  const cuuint64_t strides[4] = {bytes(tensor.head_stride), row, row, ((cuuint64_t)1 << 34) - row};
  const cuuint32_t box[5] = {64, 1, (cuuint32_t)box_rows, 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto encode = encode_tiled();
  return encode && encode(map, type, 5, const_cast<void*>(tensor.data), sizes, strides, box, element_strides,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace mla_prefill::sm90
