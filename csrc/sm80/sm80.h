// The portable NVIDIA backend of ragged_prefill.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "params.h"
#include "sm80/arguments.h"
#include "sm80/config.h"

namespace mla_prefill::sm80 {

// Launches the kernel on a plan in device memory; any backend's plan will do. `shared_bytes` is the most that a CTA of
// the device may have. Empty, or what went wrong.
std::string run(const PrefillParams& params, int32_t* plan, int num_sms, int shared_bytes, cudaStream_t stream);

}  // namespace mla_prefill::sm80
