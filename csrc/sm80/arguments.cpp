#include "sm80/arguments.h"

#include <algorithm>

#include "sm80/layout.h"

namespace mla_prefill::sm80 {
namespace {

template <typename RowsType>
RowsType without_free_strides(RowsType tensor, int64_t rows, int64_t heads) {
  if (rows <= 1) tensor.row_stride = 0;
  if (heads <= 1) tensor.head_stride = 0;
  return tensor;
}

bool has_whole_rows(const ConstRows& tensor) {
  return is_aligned(tensor, kChunkBytes) && tensor.row_stride >= INT32_MIN && tensor.row_stride <= INT32_MAX;
}

}  // namespace

std::string check_dims(int32_t dim_qk, int32_t dim_k, int32_t dim_v) {
  const auto suits = [](int32_t dim) { return dim <= kMaxHeadDim && dim % kHeadDimMultiple == 0; };
  if (suits(dim_qk) && suits(dim_k) && suits(dim_v)) return "";
  return "head dims: expected multiples of " + std::to_string(kHeadDimMultiple) + " up to " +
         std::to_string(kMaxHeadDim) + " for q, k and v (sm80 kernel), got q of " + std::to_string(dim_qk) + ", k of " +
         std::to_string(dim_k) + ", v of " + std::to_string(dim_v);
}

std::string supports(const PrefillParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return std::string("q: expected bfloat16 or float16 (sm80 kernel), got ") +
           (p.dtype == DType::kFloat32 ? "float32" : "float8_e4m3fn");
  }
  return check_dims(p.dim_qk, p.dim_k, p.dim_v);
}

plan::Config plan_config(int32_t dim_qk, int32_t dim_v, int32_t shared_bytes) {
  const int chosen = choose_variant(dim_qk, dim_v, shared_bytes);
  return chosen < 0 ? plan::Config{} : plan_config(variant_at(chosen));
}

PrefillParams normalised(PrefillParams p) {
  p.q = without_free_strides(p.q, p.total_q, p.num_heads);
  p.k = without_free_strides(p.k, p.total_k, p.num_heads);
  if (p.dim_k < p.dim_qk) {
    p.k_pe = without_free_strides(p.k_pe, p.total_k, 1);
  } else {
    p.dim_k = std::min(p.dim_qk, kLeftColumns);
    p.k_pe = p.k;
    if (p.dim_k < p.dim_qk) p.k_pe.data = static_cast<const uint16_t*>(p.k.data) + p.dim_k;
  }
  p.v = without_free_strides(p.v, p.total_k, p.num_heads);
  p.out = without_free_strides(p.out, p.total_q, p.num_heads);
  return p;
}

bool q_is_whole(const PrefillParams& p, const Variant& variant) {
  return p.dim_qk == variant.head_dim_qk && has_whole_rows(p.q);
}

bool kv_is_whole(const PrefillParams& p, const Variant& variant) {
  return p.dim_qk == variant.head_dim_qk && p.dim_k == std::min(p.dim_qk, kLeftColumns) &&
         p.dim_v == variant.head_dim_v && has_whole_rows(p.k) && has_whole_rows(p.k_pe) && has_whole_rows(p.v);
}

}  // namespace mla_prefill::sm80
