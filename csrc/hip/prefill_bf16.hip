#include "hip/launch.h"

namespace mla_prefill::hip {
template hipError_t launch<__bf16>(const KernelParams&, hipStream_t);
}
