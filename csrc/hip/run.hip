#include "hip/hip.h"
#include "hip/launch.h"

namespace mla_prefill::hip {

std::string run(const PrefillParams& params, int32_t* plan, int num_cus, hipStream_t stream) {
  const KernelParams kernel_params = {normalised(params), plan, num_cus * kBlocksPerCu};
  const hipError_t status = params.dtype == DType::kBFloat16 ? launch<__bf16>(kernel_params, stream)
                                                             : launch<_Float16>(kernel_params, stream);
  return status == hipSuccess ? "" : std::string("ragged_prefill: the launch failed: ") + hipGetErrorString(status);
}

}  // namespace mla_prefill::hip
