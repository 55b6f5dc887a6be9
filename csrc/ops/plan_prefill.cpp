#include <limits>

#include "cpu/cpu.h"
#include "ops/prefill.h"

namespace mla_prefill::ops {
namespace {

Tensor plan_prefill_cpu(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                        int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const plan::Problem problem =
      check_plan(cu_seqlens_q, cu_seqlens_k, num_heads, causal, dim_nope, dim_rope, dim_v, dtype, max_tokens_q);
  const int64_t batch = problem.batch;
  constexpr int64_t kAnyRows = std::numeric_limits<int32_t>::max();  // the tensors are not known yet
  expect_cu_seqlens_values("cu_seqlens_q", problem.cu_seqlens_q, batch, kAnyRows, "q");
  expect_cu_seqlens_values("cu_seqlens_k", problem.cu_seqlens_k, batch, kAnyRows, "k");

  const int64_t capacity = plan::max_items(max_tokens_q, batch, num_heads);
  Tensor buffer = torch::stable::empty({plan::kItemsBegin + plan::kItemInts * capacity}, ScalarType::Int);
  const std::string reason =
      plan::write(cpu::plan_config(), problem, static_cast<int32_t*>(buffer.mutable_data_ptr()), capacity);
  if (!reason.empty()) fail(reason);
  return buffer;
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CPU, m) {
  m.impl("plan_prefill", TORCH_BOX(&mla_prefill::ops::plan_prefill_cpu));
}
