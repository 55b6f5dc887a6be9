#include "context/context.h"
#include "ops/context.h"

namespace mla_prefill::ops {
namespace {

void merge_states_cpu(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                      const Tensor& out, const Tensor& lse) {
  context::merge_on_cpu(check_merge(out_a, lse_a, out_b, lse_b, out, lse), torch_parallel());
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CPU, m) {
  m.impl("merge_states", TORCH_BOX(&mla_prefill::ops::merge_states_cpu));
}
