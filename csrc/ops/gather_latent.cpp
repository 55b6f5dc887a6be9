#include "context/context.h"
#include "ops/context.h"

namespace mla_prefill::ops {
namespace {

void gather_latent_cpu(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens, const Tensor& starts,
                       const Tensor& out, const std::optional<Tensor>& k_scale, const std::string& layout) {
  const GatherParams params = check_gather(cache, block_table, cu_seqlens, starts, out, k_scale, layout);
  expect_cu_seqlens_values("cu_seqlens", params.cu_seqlens, params.batch, out.size(0), "out");
  for (int32_t i = 0; i < params.batch; ++i) {
    MLA_EXPECT(params.starts[i] >= 0, "starts", "positions of 0 or above", text(params.starts[i], " at entry ", i));
  }
  context::gather_on_cpu(params, torch_parallel());
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CPU, m) {
  m.impl("gather_latent", TORCH_BOX(&mla_prefill::ops::gather_latent_cpu));
}
