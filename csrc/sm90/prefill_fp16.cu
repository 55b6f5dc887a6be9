#include "sm90/launch.cuh"

namespace mla_prefill::sm90 {
template cudaError_t launch<__half, Dims192>(const KernelParams&, int, cudaStream_t);
template cudaError_t launch<__half, Dims128>(const KernelParams&, int, cudaStream_t);
template cudaError_t launch<__half, Dims256>(const KernelParams&, int, cudaStream_t);
}  // namespace mla_prefill::sm90
