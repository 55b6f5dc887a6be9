#include "sm90/launch.cuh"

namespace mla_prefill::sm90 {
template cudaError_t launch<__half>(const KernelParams&, int, cudaStream_t);
}
