// The AMD backend of ragged_prefill.
#pragma once

#include <hip/hip_runtime.h>

#include <string>

#include "hip/arguments.h"
#include "hip/config.h"
#include "params.h"

namespace mla_prefill::hip {

// Launches the kernel on a plan in device memory. Empty, or what went wrong.
std::string run(const PrefillParams& params, int32_t* plan, int num_cus, hipStream_t stream);

}  // namespace mla_prefill::hip
