#include "hip/launch.h"

namespace mla_prefill::hip {
template hipError_t launch<_Float16>(const KernelParams&, hipStream_t);
}
