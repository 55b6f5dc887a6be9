#include "ops/prefill.h"

#include <cmath>
#include <limits>

namespace mla_prefill::ops {
namespace {

// A [rows, heads, dim] input of q's dtype on q's device.
void expect_input(const char* name, const Tensor& tensor, const Tensor& q, const char* meaning) {
  MLA_EXPECT(tensor.dim() == 3, name, text("a 3-D tensor ", meaning), shape_text(tensor));
  MLA_EXPECT(tensor.scalar_type() == q.scalar_type(), name, text("q's dtype, ", dtype_text(q.scalar_type())),
             dtype_text(tensor.scalar_type()));
  expect_same_device(name, tensor, "q", q);
  expect_unit_last_stride(name, tensor);
}

void expect_hint(const char* name, std::optional<int64_t> max_seqlen) {
  MLA_EXPECT(!max_seqlen || *max_seqlen >= 0, name, "0 or above", *max_seqlen);
}

Descale descale(const char* name, const std::optional<Tensor>& tensor, const Tensor& q) {
  if (!tensor) return {};
  const int64_t num_heads = q.size(1);
  MLA_EXPECT(q.scalar_type() == ScalarType::Float8_e4m3fn, name,
             text("None for ", dtype_text(q.scalar_type()), " inputs (it is the factor of float8_e4m3fn ones)"),
             "a tensor");
  expect_dtype(name, *tensor, ScalarType::Float);
  expect_same_device(name, *tensor, "q", q);
  MLA_EXPECT(tensor->numel() == 1 || (tensor->dim() == 1 && tensor->size(0) == num_heads), name,
             text("one value, or one per head: [", num_heads, "]"), shape_text(*tensor));
  return {static_cast<const float*>(tensor->const_data_ptr()), tensor->numel() == 1 ? 0 : tensor->stride(0)};
}

// k_pe as [total_k, 1, rope] or [total_k, rope], shared by the heads.
ConstRows shared_key(const Tensor& k_pe, const Tensor& q, const Tensor& k, int64_t rope) {
  MLA_EXPECT(k_pe.scalar_type() == q.scalar_type(), "k_pe", text("q's dtype, ", dtype_text(q.scalar_type())),
             dtype_text(k_pe.scalar_type()));
  expect_same_device("k_pe", k_pe, "q", q);
  const char* meaning = "[total_k, q.shape[2] - k.shape[2]]";
  if (k_pe.dim() == 3) {
    expect_shape("k_pe", k_pe, {k.size(0), 1, rope}, "[total_k, 1, q.shape[2] - k.shape[2]]");
  } else {
    expect_shape("k_pe", k_pe, {k.size(0), rope}, meaning);
  }
  expect_unit_last_stride("k_pe", k_pe);
  return {k_pe.const_data_ptr(), k_pe.stride(0), 0};
}

}  // namespace

PrefillParams check_prefill(const PrefillArguments& args) {
  const Tensor &q = args.q, &k = args.k, &v = args.v;
  const std::optional<DType> dtype = kernel_dtype(q.scalar_type());
  MLA_EXPECT(dtype, "q", "float32, bfloat16, float16 or float8_e4m3fn", dtype_text(q.scalar_type()));
  expect_input("q", q, q, "[total_q, num_heads, qk_head_dim]");
  const int64_t total_q = q.size(0), num_heads = q.size(1), dim_qk = q.size(2);
  MLA_EXPECT(num_heads >= 1 && dim_qk >= 1, "q", "at least one head and one element per head", shape_text(q));

  expect_input("k", k, q, "[total_k, num_heads, qk_head_dim or qk_nope_head_dim]");
  const int64_t total_k = k.size(0), dim_k = k.size(2);
  MLA_EXPECT(k.size(1) == num_heads, "k", text("q's ", num_heads, " heads"), shape_text(k));
  if (args.k_pe) {
    MLA_EXPECT(dim_k >= 1 && dim_k < dim_qk, "k", text("1 to ", dim_qk - 1, " elements per head beside k_pe"),
               shape_text(k));
  } else {
    MLA_EXPECT(dim_k == dim_qk, "k", text("q's ", dim_qk, " elements per head (or k_pe with the rest)"), shape_text(k));
  }
  expect_input("v", v, q, "[total_k, num_heads, v_head_dim]");
  MLA_EXPECT(v.size(0) == total_k && v.size(1) == num_heads && v.size(2) >= 1, "v",
             text("shape [total_k, num_heads, v_head_dim] = [", total_k, ", ", num_heads, ", at least 1]"),
             shape_text(v));

  const int64_t batch = args.cu_seqlens_q.numel() - 1;
  MLA_EXPECT(batch >= 0, "cu_seqlens_q", "batch + 1 entries, at least one", "none");
  expect_int32_vector("cu_seqlens_q", args.cu_seqlens_q, batch + 1, "[batch + 1]");
  expect_int32_vector("cu_seqlens_k", args.cu_seqlens_k, batch + 1, "[batch + 1] of cu_seqlens_q");
  expect_same_device("cu_seqlens_q", args.cu_seqlens_q, "q", q);
  expect_same_device("cu_seqlens_k", args.cu_seqlens_k, "q", q);
  MLA_EXPECT(std::isfinite(args.scale), "scale", "a finite number", args.scale);
  expect_hint("max_seqlen_q", args.max_seqlen_q);
  expect_hint("max_seqlen_k", args.max_seqlen_k);

  const ScalarType out_dtype = dtype == DType::kFloat8E4M3 ? ScalarType::BFloat16 : q.scalar_type();
  expect_dtype("out", args.out, out_dtype);
  expect_shape("out", args.out, {total_q, num_heads, v.size(2)}, "[total_q, num_heads, v_head_dim]");
  expect_same_device("out", args.out, "q", q);
  expect_unit_last_stride("out", args.out);
  expect_no_overlap("out", args.out);
  MLA_EXPECT(args.lse || !args.accumulate, "lse", "the running state's lse with accumulate=True", "None");
  if (args.lse) {
    expect_dtype("lse", *args.lse, ScalarType::Float);
    expect_shape("lse", *args.lse, {num_heads, total_q}, "[num_heads, total_q]");
    expect_same_device("lse", *args.lse, "q", q);
    expect_no_overlap("lse", *args.lse);
  }
  if (args.plan) {
    expect_dtype("plan", *args.plan, ScalarType::Int);
    MLA_EXPECT(args.plan->dim() == 1 && args.plan->is_contiguous(), "plan", "a dense vector made by plan_prefill",
               text(shape_text(*args.plan), " with ", stride_text(*args.plan)));
    expect_same_device("plan", *args.plan, "q", q);
  }

  PrefillParams params;
  params.q = const_rows(q);
  params.k = const_rows(k);
  if (args.k_pe) params.k_pe = shared_key(*args.k_pe, q, k, dim_qk - dim_k);
  params.v = const_rows(v);
  params.out = rows(args.out);
  if (args.lse)
    params.lse = {static_cast<float*>(args.lse->mutable_data_ptr()), args.lse->stride(0), args.lse->stride(1)};
  params.cu_seqlens_q = static_cast<const int32_t*>(args.cu_seqlens_q.const_data_ptr());
  params.cu_seqlens_k = static_cast<const int32_t*>(args.cu_seqlens_k.const_data_ptr());
  params.batch = (int32_t)batch;
  params.num_heads = (int32_t)num_heads;
  params.total_q = total_q;
  params.total_k = total_k;
  params.dim_qk = (int32_t)dim_qk;
  params.dim_k = (int32_t)dim_k;
  params.dim_v = (int32_t)v.size(2);
  params.scale = (float)args.scale;
  params.causal = args.causal;
  params.accumulate = args.accumulate;
  params.dtype = *dtype;
  params.out_dtype = *kernel_dtype(out_dtype);
  params.q_descale = descale("q_descale", args.q_descale, q);
  params.k_descale = descale("k_descale", args.k_descale, q);
  params.v_descale = descale("v_descale", args.v_descale, q);
  return params;
}

plan::Problem check_plan(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t num_heads, bool causal,
                         int64_t dim_nope, int64_t dim_rope, int64_t dim_v, ScalarType dtype, int64_t max_tokens_q) {
  const int64_t batch = cu_seqlens_q.numel() - 1;
  MLA_EXPECT(batch >= 0, "cu_seqlens_q", "batch + 1 entries, at least one", "none");
  expect_int32_vector("cu_seqlens_q", cu_seqlens_q, batch + 1, "[batch + 1]");
  expect_int32_vector("cu_seqlens_k", cu_seqlens_k, batch + 1, "[batch + 1] of cu_seqlens_q");
  expect_same_device("cu_seqlens_k", cu_seqlens_k, "cu_seqlens_q", cu_seqlens_q);
  MLA_EXPECT(num_heads >= 1 && num_heads <= std::numeric_limits<int32_t>::max(), "num_heads", "1 or above", num_heads);
  MLA_EXPECT(dim_nope >= 1 && dim_rope >= 0 && dim_v >= 1, "head_dims", "(nope >= 1, rope >= 0, v >= 1)",
             text("(", dim_nope, ", ", dim_rope, ", ", dim_v, ")"));
  const std::optional<DType> kernel = kernel_dtype(dtype);
  MLA_EXPECT(kernel, "dtype", "float32, bfloat16, float16 or float8_e4m3fn", dtype_text(dtype));
  MLA_EXPECT(max_tokens_q >= 0, "max_tokens_q", "0 or above", max_tokens_q);

  return {static_cast<const int32_t*>(cu_seqlens_q.const_data_ptr()),
          static_cast<const int32_t*>(cu_seqlens_k.const_data_ptr()),
          (int32_t)batch,
          (int32_t)num_heads,
          causal,
          (dim_nope + dim_rope + dim_v) * size_of(*kernel)};
}

}  // namespace mla_prefill::ops
