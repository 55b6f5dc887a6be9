#include "cpu/cpu.h"
#include "ops/prefill.h"

namespace mla_prefill::ops {
namespace {

void run_on_cpu(const PrefillArguments& args) {
  const PrefillParams params = check_prefill(args);
  expect_cu_seqlens_values("cu_seqlens_q", params.cu_seqlens_q, params.batch, params.total_q, "q");
  expect_cu_seqlens_values("cu_seqlens_k", params.cu_seqlens_k, params.batch, params.total_k, "k");
  if (const std::string reason = cpu::supports(params); !reason.empty()) fail(reason);

  const plan::Config config = cpu::plan_config();
  const plan::Problem problem = problem_of(params);
  if (args.plan) {
    const int32_t* buffer = static_cast<const int32_t*>(args.plan->const_data_ptr());
    if (const std::string reason = plan::check(config, problem, buffer, args.plan->numel()); !reason.empty()) {
      fail(reason);
    }
    cpu::run(params, plan::items(buffer), reinterpret_cast<const plan::Header*>(buffer)->num_items, torch_parallel());
  } else {
    const std::vector<plan::WorkItem> items = plan::make_items(config, problem);
    cpu::run(params, items.data(), (int64_t)items.size(), torch_parallel());
  }
}

void ragged_prefill_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& k_pe,
                        const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, double scale, bool causal,
                        std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k,
                        const std::optional<Tensor>& plan, const Tensor& out, const std::optional<Tensor>& lse,
                        bool accumulate, const std::optional<Tensor>& q_descale, const std::optional<Tensor>& k_descale,
                        const std::optional<Tensor>& v_descale) {
  run_on_cpu({q, k, v, k_pe, cu_seqlens_q, cu_seqlens_k, scale, causal, max_seqlen_q, max_seqlen_k, plan, out, lse,
              accumulate, q_descale, k_descale, v_descale});
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CPU, m) {
  m.impl("ragged_prefill", TORCH_BOX(&mla_prefill::ops::ragged_prefill_cpu));
}
