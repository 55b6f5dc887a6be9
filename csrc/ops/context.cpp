#include "ops/context.h"

#include "context/context.h"

namespace mla_prefill::ops {
namespace {

CacheLayout resolve_layout(const std::string& layout, const Argument& cache) {
  const ScalarType dtype = cache.dtype;
  const bool bytes = dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Byte;
  const bool plain = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float;
  const int64_t width = cache.size(2);
  if (layout == "auto") {
    if (plain) return CacheLayout::kPlain;
    if (bytes) return width == context::kDsMlaRowBytes ? CacheLayout::kFp8DsMla : CacheLayout::kFp8E4M3;
    fail(text("cache: expected bfloat16, float16, float32, float8_e4m3fn or uint8, got ", dtype_text(dtype)));
  }
  if (layout == "plain") {
    MLA_EXPECT(plain, "cache", "bfloat16, float16 or float32 with layout 'plain'", dtype_text(dtype));
    return CacheLayout::kPlain;
  }
  if (layout == "fp8_e4m3") {
    MLA_EXPECT(bytes, "cache", "float8_e4m3fn or uint8 with layout 'fp8_e4m3'", dtype_text(dtype));
    return CacheLayout::kFp8E4M3;
  }
  if (layout == "fp8_ds_mla") {
    MLA_EXPECT(bytes && width == context::kDsMlaRowBytes, "cache",
               text("uint8 or float8_e4m3fn rows of ", context::kDsMlaRowBytes, " bytes with layout 'fp8_ds_mla'"),
               text(dtype_text(dtype), " of ", shape_text(cache)));
    return CacheLayout::kFp8DsMla;
  }
  fail(text("layout: expected 'auto', 'plain', 'fp8_e4m3' or 'fp8_ds_mla', got '", layout, "'"));
}

ConstLse const_lse(const Argument& lse) { return {const_data<float>(lse), lse.stride(0), lse.stride(1)}; }

}  // namespace

GatherParams check_gather(const Tensor& cache_tensor, const Tensor& block_table_tensor, const Tensor& cu_seqlens_tensor,
                          const Tensor& starts_tensor, const Tensor& out_tensor,
                          const std::optional<Tensor>& k_scale_tensor, const std::string& layout_name) {
  const Argument cache("cache", cache_tensor), block_table("block_table", block_table_tensor),
      cu_seqlens("cu_seqlens", cu_seqlens_tensor), starts("starts", starts_tensor), out("out", out_tensor);
  MLA_EXPECT(cache.dim == 3, "cache", "a 3-D tensor [num_blocks, block_size, width]", shape_text(cache));
  MLA_EXPECT(cache.size(1) >= 1 && cache.size(2) >= 1, "cache", "a block_size and a width of at least 1",
             shape_text(cache));
  expect_unit_last_stride(cache);
  const CacheLayout layout = resolve_layout(layout_name, cache);
  const int64_t dim = layout == CacheLayout::kFp8DsMla ? context::kDsMlaLatent + context::kDsMlaRope : cache.size(2);

  const int64_t batch = cu_seqlens.numel() - 1;
  MLA_EXPECT(batch >= 0, "cu_seqlens", "batch + 1 entries, at least one", "none");
  expect_int32_vector(cu_seqlens, batch + 1, "[batch + 1]");
  expect_same_device(cu_seqlens, cache);
  expect_int32_vector(starts, batch, "[batch]");
  expect_same_device(starts, cache);
  expect_dtype(block_table, ScalarType::Int);
  MLA_EXPECT(block_table.dim == 2 && block_table.size(0) == batch, "block_table",
             text("shape [batch, max_blocks] = [", batch, ", any]"), shape_text(block_table));
  expect_unit_last_stride(block_table);
  expect_same_device(block_table, cache);

  const std::optional<DType> out_dtype = kernel_dtype(out.dtype);
  if (layout == CacheLayout::kPlain) {
    MLA_EXPECT(out.dtype == cache.dtype, "out", text("the cache's dtype, ", dtype_text(cache.dtype)),
               dtype_text(out.dtype));
  } else {
    MLA_EXPECT(out_dtype && *out_dtype != DType::kFloat8E4M3, "out", "bfloat16, float16 or float32 from a float8 cache",
               dtype_text(out.dtype));
  }
  MLA_EXPECT(out.dim == 2 && out.size(1) == dim, "out", text("shape [rows, ", dim, "]"), shape_text(out));
  expect_unit_last_stride(out);
  expect_no_overlap(out);
  expect_same_device(out, cache);

  GatherParams params;
  if (k_scale_tensor) {
    const Argument k_scale("k_scale", *k_scale_tensor);
    expect_dtype(k_scale, ScalarType::Float);
    MLA_EXPECT(k_scale.numel() == 1 && k_scale.dim <= 1, "k_scale",
               "one scale for the whole cache (a float, a 0-dim or a [1] tensor)", shape_text(k_scale));
    expect_same_device(k_scale, cache);
    if (layout == CacheLayout::kFp8E4M3) params.k_scale = const_data<float>(k_scale);
  }
  params.cache = const_data<void>(cache);
  params.block_stride = cache.stride(0);
  params.slot_stride = cache.stride(1);
  params.num_blocks = cache.size(0);
  params.block_size = (int32_t)cache.size(1);
  params.block_table = const_data<int32_t>(block_table);
  params.block_table_stride = block_table.stride(0);
  params.max_blocks = (int32_t)block_table.size(1);
  params.cu_seqlens = const_data<int32_t>(cu_seqlens);
  params.starts = const_data<int32_t>(starts);
  params.batch = (int32_t)batch;
  params.out = mutable_data<void>(out);
  params.out_rows = out.size(0);
  params.out_stride = out.stride(0);
  params.dim = (int32_t)dim;
  params.layout = layout;
  params.out_dtype = *out_dtype;
  return params;
}

MergeParams check_merge(const Tensor& out_a_tensor, const Tensor& lse_a_tensor, const Tensor& out_b_tensor,
                        const Tensor& lse_b_tensor, const Tensor& out_tensor, const Tensor& lse_tensor) {
  const Argument out_a("out_a", out_a_tensor), out_b("out_b", out_b_tensor), out("out", out_tensor);
  const Argument lse_a("lse_a", lse_a_tensor), lse_b("lse_b", lse_b_tensor), lse("lse", lse_tensor);
  const std::optional<DType> dtype = kernel_dtype(out_a.dtype);
  MLA_EXPECT(dtype && *dtype != DType::kFloat8E4M3, "out_a", "float32, bfloat16 or float16", dtype_text(out_a.dtype));
  MLA_EXPECT(out_a.dim == 3, "out_a", "a 3-D tensor [tokens, num_heads, v_head_dim]", shape_text(out_a));
  const int64_t tokens = out_a.size(0), num_heads = out_a.size(1), dim_v = out_a.size(2);

  for (const Argument* side : {&out_a, &out_b, &out}) {
    expect_dtype(*side, out_a.dtype);
    expect_shape(*side, {tokens, num_heads, dim_v}, "[tokens, num_heads, v_head_dim] of out_a");
    expect_same_device(*side, out_a);
    expect_unit_last_stride(*side);
  }
  for (const Argument* side : {&lse_a, &lse_b, &lse}) {
    expect_dtype(*side, ScalarType::Float);
    expect_shape(*side, {num_heads, tokens}, "[num_heads, tokens] of out_a");
    expect_same_device(*side, out_a);
  }
  expect_no_overlap(out);
  expect_no_overlap(lse);

  MergeParams params;
  params.out_a = const_rows(out_a);
  params.lse_a = const_lse(lse_a);
  params.out_b = const_rows(out_b);
  params.lse_b = const_lse(lse_b);
  params.out = rows(out);
  params.lse = {mutable_data<float>(lse), lse.stride(0), lse.stride(1)};
  params.tokens = tokens;
  params.num_heads = (int32_t)num_heads;
  params.dim_v = (int32_t)dim_v;
  params.dtype = *dtype;
  return params;
}

}  // namespace mla_prefill::ops
