#include "sm90/launch.cuh"

namespace mla_prefill::sm90 {
template cudaError_t launch<__nv_bfloat16, Dims192>(const KernelParams&, int, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, Dims128>(const KernelParams&, int, cudaStream_t);
template cudaError_t launch<__nv_bfloat16, Dims256>(const KernelParams&, int, cudaStream_t);
}  // namespace mla_prefill::sm90
