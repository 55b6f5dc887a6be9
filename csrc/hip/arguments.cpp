#include "hip/arguments.h"

#include "hip/config.h"

namespace mla_prefill::hip {
namespace {

std::string unsupported(const char* argument, const std::string& expected, const std::string& got) {
  return std::string(argument) + ": expected " + expected + " (hip kernel), got " + got;
}

// Strides that nothing steps over are free; here they become those of a dense tensor.
template <typename RowsType>
RowsType without_free_strides(RowsType tensor, int64_t rows, int64_t heads, int64_t width) {
  if (rows <= 1) tensor.row_stride = width;
  if (heads <= 1) tensor.head_stride = 0;
  return tensor;
}

std::string check_rows(const char* name, const void* data, int64_t row_stride, int64_t head_stride, int64_t width) {
  if (reinterpret_cast<uintptr_t>(data) % 4 != 0 || row_stride % 2 != 0 || head_stride % 2 != 0) {
    return unsupported(name, "a base address and strides that are multiples of 4 bytes",
                       "an address that is " + std::to_string(reinterpret_cast<uintptr_t>(data) % 4) +
                           " modulo 4 and strides of " + std::to_string(row_stride) + " and " +
                           std::to_string(head_stride) + " elements");
  }
  // Rows past a sequence's end are told from its own by their address.
  if (row_stride != 0 && (row_stride < width || row_stride > kMaxRowStride)) {
    return unsupported(
        name, "a row stride of 0 or of " + std::to_string(width) + " to " + std::to_string(kMaxRowStride) + " elements",
        std::to_string(row_stride));
  }
  return "";
}

}  // namespace

PrefillParams normalised(PrefillParams p) {
  const bool split = p.dim_k != p.dim_qk;
  p.q = without_free_strides(p.q, p.total_q, p.num_heads, kHeadDimQK);
  p.k = without_free_strides(p.k, p.total_k, p.num_heads, p.dim_k);
  p.v = without_free_strides(p.v, p.total_k, p.num_heads, kHeadDimV);
  p.out = without_free_strides(p.out, p.total_q, p.num_heads, kHeadDimV);
  if (split) {
    p.k_pe = without_free_strides(p.k_pe, p.total_k, 1, kHeadDimRope);
  } else {
    p.k_pe = p.k;
    p.k_pe.data = static_cast<const uint16_t*>(p.k.data) + kHeadDimNope;
  }
  return p;
}

std::string supports(const PrefillParams& params) {
  if (params.dtype != DType::kBFloat16 && params.dtype != DType::kFloat16) {
    return unsupported("q", "bfloat16 or float16", params.dtype == DType::kFloat32 ? "float32" : "float8_e4m3fn");
  }
  const bool split = params.dim_k != params.dim_qk;
  if (params.dim_qk != kHeadDimQK || params.dim_v != kHeadDimV || (split && params.dim_k != kHeadDimNope)) {
    return unsupported("head dims", "(nope, rope, v) = (128, 64, 128)",
                       "q of " + std::to_string(params.dim_qk) + ", k of " + std::to_string(params.dim_k) + ", v of " +
                           std::to_string(params.dim_v));
  }
  if (!(params.scale > 0.0f)) return unsupported("scale", "a number above 0", std::to_string(params.scale));
  const PrefillParams p = normalised(params);
  for (const std::string& reason :
       {check_rows("q", p.q.data, p.q.row_stride, p.q.head_stride, kHeadDimQK),
        check_rows("k", p.k.data, p.k.row_stride, p.k.head_stride, p.dim_k),
        check_rows("k_pe", p.k_pe.data, p.k_pe.row_stride, p.k_pe.head_stride, kHeadDimRope),
        check_rows("v", p.v.data, p.v.row_stride, p.v.head_stride, kHeadDimV),
        check_rows("out", p.out.data, p.out.row_stride, p.out.head_stride, kHeadDimV)}) {
    if (!reason.empty()) return reason;
  }
  return "";
}

}  // namespace mla_prefill::hip
