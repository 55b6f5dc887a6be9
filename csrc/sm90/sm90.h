// The Hopper backend of ragged_prefill.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "params.h"
#include "sm90/config.h"

namespace mla_prefill::sm90 {

// Empty if this backend computes `params`, otherwise which argument it can't take and why. Reads no device memory.
std::string supports(const PrefillParams& params);

// Device memory that run() needs at params.scratch: 0 where no item can be split. For one launch at a time.
int64_t scratch_bytes(const PrefillParams& params);

// Launches the kernel on a plan in device memory. Empty, or what went wrong.
std::string run(const PrefillParams& params, int32_t* plan, int num_sms, cudaStream_t stream);

}  // namespace mla_prefill::sm90
