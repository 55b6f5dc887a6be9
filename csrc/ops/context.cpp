#include "ops/context.h"

#include "context/context.h"

namespace mla_prefill::ops {
namespace {

CacheLayout resolve_layout(const std::string& layout, const Tensor& cache) {
  const ScalarType dtype = cache.scalar_type();
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

ConstLse const_lse(const Tensor& lse) {
  return {static_cast<const float*>(lse.const_data_ptr()), lse.stride(0), lse.stride(1)};
}

}  // namespace

GatherParams check_gather(const Tensor& cache, const Tensor& block_table, const Tensor& cu_seqlens,
                          const Tensor& starts, const Tensor& out, const std::optional<Tensor>& k_scale,
                          const std::string& layout_name) {
  MLA_EXPECT(cache.dim() == 3, "cache", "a 3-D tensor [num_blocks, block_size, width]", shape_text(cache));
  MLA_EXPECT(cache.size(1) >= 1 && cache.size(2) >= 1, "cache", "a block_size and a width of at least 1",
             shape_text(cache));
  expect_unit_last_stride("cache", cache);
  const CacheLayout layout = resolve_layout(layout_name, cache);
  const int64_t dim = layout == CacheLayout::kFp8DsMla ? context::kDsMlaLatent + context::kDsMlaRope : cache.size(2);

  const int64_t batch = cu_seqlens.numel() - 1;
  MLA_EXPECT(batch >= 0, "cu_seqlens", "batch + 1 entries, at least one", "none");
  expect_int32_vector("cu_seqlens", cu_seqlens, batch + 1, "[batch + 1]");
  expect_same_device("cu_seqlens", cu_seqlens, "cache", cache);
  expect_int32_vector("starts", starts, batch, "[batch]");
  expect_same_device("starts", starts, "cache", cache);
  expect_dtype("block_table", block_table, ScalarType::Int);
  MLA_EXPECT(block_table.dim() == 2 && block_table.size(0) == batch, "block_table",
             text("shape [batch, max_blocks] = [", batch, ", any]"), shape_text(block_table));
  expect_unit_last_stride("block_table", block_table);
  expect_same_device("block_table", block_table, "cache", cache);

  const std::optional<DType> out_dtype = kernel_dtype(out.scalar_type());
  if (layout == CacheLayout::kPlain) {
    MLA_EXPECT(out.scalar_type() == cache.scalar_type(), "out",
               text("the cache's dtype, ", dtype_text(cache.scalar_type())), dtype_text(out.scalar_type()));
  } else {
    MLA_EXPECT(out_dtype && *out_dtype != DType::kFloat8E4M3, "out", "bfloat16, float16 or float32 from a float8 cache",
               dtype_text(out.scalar_type()));
  }
  MLA_EXPECT(out.dim() == 2 && out.size(1) == dim, "out", text("shape [rows, ", dim, "]"), shape_text(out));
  expect_unit_last_stride("out", out);
  expect_no_overlap("out", out);
  expect_same_device("out", out, "cache", cache);
  if (k_scale) {
    expect_dtype("k_scale", *k_scale, ScalarType::Float);
    MLA_EXPECT(k_scale->numel() == 1 && k_scale->dim() <= 1, "k_scale",
               "one scale for the whole cache (a float, a 0-dim or a [1] tensor)", shape_text(*k_scale));
    expect_same_device("k_scale", *k_scale, "cache", cache);
  }

  GatherParams params;
  params.cache = cache.const_data_ptr();
  params.block_stride = cache.stride(0);
  params.slot_stride = cache.stride(1);
  params.num_blocks = cache.size(0);
  params.block_size = (int32_t)cache.size(1);
  params.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  params.block_table_stride = block_table.stride(0);
  params.max_blocks = (int32_t)block_table.size(1);
  params.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
  params.starts = static_cast<const int32_t*>(starts.const_data_ptr());
  params.batch = (int32_t)batch;
  params.out = out.mutable_data_ptr();
  params.out_rows = out.size(0);
  params.out_stride = out.stride(0);
  params.dim = (int32_t)dim;
  params.layout = layout;
  params.out_dtype = *out_dtype;
  if (k_scale && layout == CacheLayout::kFp8E4M3) params.k_scale = static_cast<const float*>(k_scale->const_data_ptr());
  return params;
}

MergeParams check_merge(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                        const Tensor& out, const Tensor& lse) {
  const std::optional<DType> dtype = kernel_dtype(out_a.scalar_type());
  MLA_EXPECT(dtype && *dtype != DType::kFloat8E4M3, "out_a", "float32, bfloat16 or float16",
             dtype_text(out_a.scalar_type()));
  MLA_EXPECT(out_a.dim() == 3, "out_a", "a 3-D tensor [tokens, num_heads, v_head_dim]", shape_text(out_a));
  const int64_t tokens = out_a.size(0), num_heads = out_a.size(1), dim_v = out_a.size(2);

  struct Named {
    const char* name;
    const Tensor& tensor;
  };
  for (const Named& side : {Named{"out_a", out_a}, Named{"out_b", out_b}, Named{"out", out}}) {
    expect_dtype(side.name, side.tensor, out_a.scalar_type());
    expect_shape(side.name, side.tensor, {tokens, num_heads, dim_v}, "[tokens, num_heads, v_head_dim] of out_a");
    expect_same_device(side.name, side.tensor, "out_a", out_a);
    expect_unit_last_stride(side.name, side.tensor);
  }
  for (const Named& side : {Named{"lse_a", lse_a}, Named{"lse_b", lse_b}, Named{"lse", lse}}) {
    expect_dtype(side.name, side.tensor, ScalarType::Float);
    expect_shape(side.name, side.tensor, {num_heads, tokens}, "[num_heads, tokens] of out_a");
    expect_same_device(side.name, side.tensor, "out_a", out_a);
  }
  expect_no_overlap("out", out);
  expect_no_overlap("lse", lse);

  MergeParams params;
  params.out_a = const_rows(out_a);
  params.lse_a = const_lse(lse_a);
  params.out_b = const_rows(out_b);
  params.lse_b = const_lse(lse_b);
  params.out = rows(out);
  params.lse = {static_cast<float*>(lse.mutable_data_ptr()), lse.stride(0), lse.stride(1)};
  params.tokens = tokens;
  params.num_heads = (int32_t)num_heads;
  params.dim_v = (int32_t)dim_v;
  params.dtype = *dtype;
  return params;
}

}  // namespace mla_prefill::ops
