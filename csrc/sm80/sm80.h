// The portable NVIDIA backend of ragged_prefill.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "params.h"
#include "sm80/arguments.h"
#include "sm80/config.h"

namespace mla_prefill::sm80 {

// Device memory that run() needs at params.scratch: 0 where no item can be split. For one launch at a time.
// `shared_bytes` is the most that a CTA of the device may have.
int64_t scratch_bytes(const PrefillParams& params, int shared_bytes);

// Launches the kernel on a plan in device memory; any backend's plan will do. Empty, or what went wrong.
std::string run(const PrefillParams& params, int32_t* plan, int num_sms, int shared_bytes, cudaStream_t stream);

}  // namespace mla_prefill::sm80
