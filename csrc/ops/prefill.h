// The arguments of ragged_prefill and plan_prefill, and the checks that need no tensor values: the same on every
// device.
#pragma once

#include "ops/arguments.h"
#include "plan/plan.h"

namespace mla_prefill::ops {

struct PrefillArguments {
  const Tensor &q, &k, &v;
  const std::optional<Tensor>& k_pe;
  const Tensor &cu_seqlens_q, &cu_seqlens_k;
  double scale;
  bool causal;
  std::optional<int64_t> max_seqlen_q, max_seqlen_k;
  const std::optional<Tensor>& plan;
  const Tensor& out;
  const std::optional<Tensor>& lse;
  bool accumulate;
  const std::optional<Tensor>&q_descale, &k_descale, &v_descale;
};

PrefillParams check_prefill(const PrefillArguments& args);

// What the planner needs to know of a call.
inline plan::Problem problem_of(const PrefillParams& params) {
  return {params.cu_seqlens_q, params.cu_seqlens_k, params.batch,
          params.num_heads,    params.causal,       (params.dim_qk + params.dim_v) * size_of(params.dtype)};
}

plan::Problem check_plan(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                         int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q);

}  // namespace mla_prefill::ops
