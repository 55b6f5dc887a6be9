// The arguments of gather_latent and merge_states, and the checks that need no tensor values: the same on every device.
#pragma once

#include "ops/arguments.h"

namespace mla_prefill::ops {

GatherParams check_gather(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens,
                          const Tensor& starts, const Tensor& out, const std::optional<Tensor>& k_scale,
                          const std::string& layout_name);

MergeParams check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                        const Tensor& out, const Tensor& lse);

}  // namespace mla_prefill::ops
