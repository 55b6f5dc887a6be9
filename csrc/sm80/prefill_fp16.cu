#include "sm80/launch.cuh"

namespace mla_prefill::sm80 {
template cudaError_t launch<__half>(int, const KernelParams&, int, cudaStream_t);
}
