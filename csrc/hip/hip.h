// The AMD backend of ragged_prefill.
#pragma once

#include <hip/hip_runtime.h>

#include <string>

#include "hip/config.h"
#include "params.h"

namespace mla_prefill::hip {

// Empty if this backend computes `params`, otherwise which argument it can't take and why. Reads no device memory.
std::string supports(const PrefillParams& params);

// Launches the kernel on a plan in device memory. Empty, or what went wrong.
std::string run(const PrefillParams& params, int32_t* plan, int num_cus, hipStream_t stream);

}  // namespace mla_prefill::hip
