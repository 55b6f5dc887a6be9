// One launch of one kernel variant. Each variant is instantiated in a file of its own.
#pragma once

#include "hip/kernel.h"

namespace mla_prefill::hip {

template <typename T>
hipError_t launch(const KernelParams& params, hipStream_t stream) {
  prefill_kernel<T><<<params.num_blocks, kThreads, 0, stream>>>(params);
  return hipGetLastError();
}

extern template hipError_t launch<__bf16>(const KernelParams&, hipStream_t);
extern template hipError_t launch<_Float16>(const KernelParams&, hipStream_t);

}  // namespace mla_prefill::hip
