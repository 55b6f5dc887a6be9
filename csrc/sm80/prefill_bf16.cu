#include "sm80/launch.cuh"

namespace mla_prefill::sm80 {
template cudaError_t launch<__nv_bfloat16>(int, const KernelParams&, int, cudaStream_t);
}
