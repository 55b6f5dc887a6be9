#include <limits>

#include "cpu/cpu.h"
#include "ops/arguments.h"
#include "plan/plan.h"

namespace mla_prefill::ops {
namespace {

Tensor plan_prefill_cpu(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                        int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const int64_t batch = cu_seqlens_q.numel() - 1;
  MLA_EXPECT(batch >= 0, "cu_seqlens_q", "batch + 1 entries, at least one", "none");
  expect_int32_vector("cu_seqlens_q", cu_seqlens_q, batch + 1, "[batch + 1]");
  expect_int32_vector("cu_seqlens_k", cu_seqlens_k, batch + 1, "[batch + 1] of cu_seqlens_q");
  expect_same_device("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q);
  MLA_EXPECT(num_heads >= 1 && num_heads <= std::numeric_limits<int32_t>::max(), "num_heads", "1 or above", num_heads);
  MLA_EXPECT(dim_nope >= 1 && dim_rope >= 0 && dim_v >= 1, "head_dims", "(nope >= 1, rope >= 0, v >= 1)",
             text("(", dim_nope, ", ", dim_rope, ", ", dim_v, ")"));
  const std::optional<DType> kernel = kernel_dtype(dtype);
  MLA_EXPECT(kernel, "dtype", "float32, bfloat16, float16 or float8_e4m3fn", dtype_text(dtype));
  MLA_EXPECT(max_tokens_q >= 0, "max_tokens_q", "0 or above", max_tokens_q);

  const plan::Problem problem = {static_cast<const int32_t*>(cu_seqlens_q.const_data_ptr()),
                                 static_cast<const int32_t*>(cu_seqlens_k.const_data_ptr()),
                                 (int32_t)batch,
                                 (int32_t)num_heads,
                                 causal,
                                 (dim_nope + dim_rope + dim_v) * size_of(*kernel)};
  constexpr int64_t kAnyRows = std::numeric_limits<int32_t>::max();  // the tensors are not known yet
  expect_cu_seqlens_values("cu_seqlens_q", problem.cu_seqlens_q, batch, kAnyRows, "q");
  expect_cu_seqlens_values("cu_seqlens_k", problem.cu_seqlens_k, batch, kAnyRows, "k");

  const int64_t capacity = plan::max_items(max_tokens_q, batch, num_heads);
  Tensor buffer = torch::stable::empty({plan::kHeaderInts + plan::kItemInts * capacity}, ScalarType::Int);
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
