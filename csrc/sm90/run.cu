#include "sm90/launch.cuh"
#include "sm90/sm90.h"

namespace mla_prefill::sm90 {
namespace {

std::string unsupported(const char* argument, const std::string& expected, const std::string& got) {
  return std::string(argument) + ": expected " + expected + " (sm90 kernel), got " + got;
}

std::string check_rows(const char* name, const ConstRows& tensor, int64_t rows, int64_t heads) {
  if (fits_ragged_map(tensor, rows, heads)) return "";
  return unsupported(name, "a base address and strides that are multiples of 16 bytes, strides below 2^34 bytes",
                     "an address that is " + std::to_string(reinterpret_cast<uintptr_t>(tensor.data) % 16) +
                         " modulo 16 and strides of " + std::to_string(tensor.row_stride) + " and " +
                         std::to_string(tensor.head_stride) + " elements");
}

// TMA reads and writes them by the same kind of map as the inputs.
ConstRows rows_of_out(const PrefillParams& p) { return {p.out.data, p.out.row_stride, p.out.head_stride}; }

template <typename Variant>
cudaError_t launch_dtype(const KernelParams& params, int num_sms, cudaStream_t stream) {
  return params.problem.dtype == DType::kBFloat16 ? launch<__nv_bfloat16, Variant>(params, num_sms, stream)
                                                  : launch<__half, Variant>(params, num_sms, stream);
}

}  // namespace

std::string supports(const PrefillParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return unsupported("q", "bfloat16 or float16", p.dtype == DType::kFloat32 ? "float32" : "float8_e4m3fn");
  }
  const bool split = p.dim_k != p.dim_qk;
  if (!takes_dims(p.dim_qk, p.dim_v) || (split && p.dim_k != p.dim_qk - kHeadDimRope)) {
    return unsupported(
        "head dims", "(nope, rope, v) = (128, 64, 128), (64, 64, 128), (128, 0, 128), (192, 64, 256) or (256, 0, 256)",
        "q of " + std::to_string(p.dim_qk) + ", k of " + std::to_string(p.dim_k) + ", v of " + std::to_string(p.dim_v));
  }
  if (!(p.scale > 0.0f)) return unsupported("scale", "a number above 0", std::to_string(p.scale));
  for (const std::string& reason :
       {check_rows("q", p.q, p.total_q, p.num_heads), check_rows("k", p.k, p.total_k, p.num_heads),
        split ? check_rows("k_pe", p.k_pe, p.total_k, 1) : std::string(), check_rows("v", p.v, p.total_k, p.num_heads),
        check_rows("out", rows_of_out(p), p.total_q, p.num_heads)}) {
    if (!reason.empty()) return reason;
  }
  return "";
}

int64_t scratch_bytes(const PrefillParams& p) { return partials_bytes(p, p.dim_v); }

std::string run(const PrefillParams& p, int32_t* plan, int num_sms, cudaStream_t stream) {
  KernelParams params;
  params.problem = p;
  params.plan = plan;
  params.partials = static_cast<float4*>(p.scratch);
  params.split_k = p.dim_k != p.dim_qk;
  const auto map_keys = [&](KeyMaps& maps, int tile_kv) {
    return make_ragged_map(&maps.k, p.k, p.dtype, p.dim_k, p.num_heads, tile_kv) &&
           (!params.split_k || make_ragged_map(&maps.k_pe, p.k_pe, p.dtype, kHeadDimRope, 1, tile_kv)) &&
           make_ragged_map(&maps.v, p.v, p.dtype, p.dim_v, p.num_heads, tile_kv);
  };
  bool mapped = make_ragged_map(&params.q, p.q, p.dtype, p.dim_qk, p.num_heads, kWarpgroupRows) &&
                make_ragged_map(&params.out, rows_of_out(p), p.dtype, p.dim_v, p.num_heads, kWarpgroupRows);
  cudaError_t status = cudaSuccess;
  with_variant(p.dim_qk, p.dim_v, [&](auto variant) {
    using Variant = decltype(variant);
    mapped = mapped && map_keys(params.long_keys, Variant::LongTile::kTileKV);
    if constexpr (Variant::kHasShortTile) mapped = mapped && map_keys(params.short_keys, Variant::ShortTile::kTileKV);
    if (mapped) status = launch_dtype<Variant>(params, num_sms, stream);
  });
  if (!mapped) return "q, k, v, out: expected tensors that a TMA descriptor can describe, got a refusal of the driver";
  if (status != cudaSuccess) return std::string("ragged_prefill: the launch failed: ") + cudaGetErrorString(status);
  return "";
}

}  // namespace mla_prefill::sm90
