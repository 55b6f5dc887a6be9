// What the portable NVIDIA kernel can take. Plain C++.
#pragma once

#include <cstdint>
#include <string>

#include "params.h"
#include "plan/plan.h"
#include "sm80/config.h"

namespace mla_prefill::sm80 {

// Empty if heads of these dims can be computed, otherwise what is expected and what came.
std::string check_dims(int32_t dim_qk, int32_t dim_k, int32_t dim_v);

// Empty if this backend computes `params`, otherwise which argument it can't take and why. Reads no device memory.
std::string supports(const PrefillParams& params);

// What the kernel wants of its plan, on a device whose CTAs may have `shared_bytes` of shared memory.
plan::Config plan_config(int32_t dim_qk, int32_t dim_v, int32_t shared_bytes);

// Supported parameters as the kernel takes them: strides that nothing steps over are 0, and keys in one tensor are two
// parts as well, k up to column kLeftColumns and k_pe from there on, which then has heads.
PrefillParams normalised(PrefillParams params);

// Whether base and strides of normalised parameters are multiples of `bytes`.
template <typename RowsType>
bool is_aligned(const RowsType& tensor, int64_t bytes) {
  constexpr int64_t kElementBytes = 2;
  return reinterpret_cast<uintptr_t>(tensor.data) % bytes == 0 && tensor.row_stride * kElementBytes % bytes == 0 &&
         tensor.head_stride * kElementBytes % bytes == 0;
}

// Whether whole tiles of normalised q, or of k and v, can be copied as such (WholeCopy): rows in 16-byte chunks, as
// wide as the tile of `variant`, less than 2^31 elements apart, and the two parts of K where a tile's are.
bool q_is_whole(const PrefillParams& params, const Variant& variant);
bool kv_is_whole(const PrefillParams& params, const Variant& variant);

}  // namespace mla_prefill::sm80
