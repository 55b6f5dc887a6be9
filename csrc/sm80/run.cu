#include <cmath>

#include "sm80/launch.cuh"
#include "sm80/sm80.h"

namespace mla_prefill::sm80 {

int64_t scratch_bytes(const PrefillParams& p, int shared_bytes) {
  return partials_bytes(p, variant_at(choose_variant(p.dim_qk, p.dim_v, shared_bytes)).head_dim_v);
}

std::string run(const PrefillParams& problem, int32_t* plan, int num_sms, int shared_bytes, cudaStream_t stream) {
  KernelParams params;
  params.problem = normalised(problem);
  params.plan = plan;
  params.partials = static_cast<float4*>(problem.scratch);
  // The softmax counts on a scale above 0: its sign and a 0 go into the scores.
  params.factor = problem.scale > 0.0f ? 1.0f : problem.scale < 0.0f ? -1.0f : 0.0f;
  params.scale_log2 = (problem.scale == 0.0f ? 1.0f : std::fabs(problem.scale)) * kLog2E;
  const PrefillParams& p = params.problem;
  params.q_in_chunks = is_aligned(p.q, kChunkBytes);
  params.k_in_chunks = is_aligned(p.k, kChunkBytes) && is_aligned(p.k_pe, kChunkBytes);
  params.v_in_chunks = is_aligned(p.v, kChunkBytes);
  params.out_aligned = is_aligned(p.out, 8);
  const int variant = choose_variant(p.dim_qk, p.dim_v, shared_bytes);
  params.q_whole = q_is_whole(p, variant_at(variant));
  params.kv_whole = kv_is_whole(p, variant_at(variant));
  params.q_stride = (int32_t)p.q.row_stride;
  params.k_stride = (int32_t)p.k.row_stride;
  params.k_right_stride = (int32_t)p.k_pe.row_stride;
  params.v_stride = (int32_t)p.v.row_stride;
  const auto launch_variant = p.dtype == DType::kBFloat16 ? launch<__nv_bfloat16> : launch<__half>;
  const cudaError_t status = launch_variant(variant, params, num_sms, stream);
  if (status != cudaSuccess) return std::string("ragged_prefill: the launch failed: ") + cudaGetErrorString(status);
  return "";
}

}  // namespace mla_prefill::sm80
