// The planner on the device: one launch for small batches, three for large ones; nothing is read back.
#pragma once

#include "gpu.h"
#include "plan/plan.h"

namespace mla_prefill::plan {

// Ints of scratch that write_on_device needs.
int64_t scratch_ints(int64_t batch);

// As plan::write, into device memory; `problem` points to device memory too. A buffer that is too small for the lengths
// (max_tokens_q was below the number of rows) gets a list cut off at its capacity.
cudaError_t write_on_device(const Config& config, const Problem& problem, int32_t* buffer, int64_t capacity,
                            int32_t* scratch, cudaStream_t stream);

}  // namespace mla_prefill::plan
