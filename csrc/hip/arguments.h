// What the AMD kernel can take. Plain C++.
#pragma once

#include <string>

#include "params.h"

namespace mla_prefill::hip {

// Empty if this backend computes `params`, otherwise which argument it can't take and why. Reads no device memory.
std::string supports(const PrefillParams& params);

// Supported parameters as the kernel takes them: strides that nothing steps over are those of a dense tensor, and k_pe
// is set for keys in one tensor too, to their last columns.
PrefillParams normalised(PrefillParams params);

}  // namespace mla_prefill::hip
