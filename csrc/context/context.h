// The context path beside attention: paged gather with dequantization, and the merge of partial states.
#pragma once

#include "parallel.h"
#include "params.h"

namespace mla_prefill::context {

// fp8_ds_mla: bytes of a cache row and what is in them.
constexpr int32_t kDsMlaRowBytes = 656;
constexpr int32_t kDsMlaLatent = 512;  // float8 e4m3
constexpr int32_t kDsMlaTile = 128;    // elements per float32 scale
constexpr int32_t kDsMlaRope = 64;     // bfloat16, unscaled
static_assert(kDsMlaRowBytes == kDsMlaLatent + kDsMlaLatent / kDsMlaTile * 4 + kDsMlaRope * 2, "row layout");

void gather_on_cpu(const GatherParams& params, const Parallel& parallel);
void merge_on_cpu(const MergeParams& params, const Parallel& parallel);

}  // namespace mla_prefill::context
