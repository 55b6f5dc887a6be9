#include "ops/prefill.h"

#include <cmath>
#include <limits>

namespace mla_prefill::ops {
namespace {

// A [rows, heads, dim] input of q's dtype on q's device.
void expect_input(const Argument& input, const Argument& q, const char* meaning) {
  MLA_EXPECT(input.dim == 3, input.name, text("a 3-D tensor ", meaning), shape_text(input));
  MLA_EXPECT(input.dtype == q.dtype, input.name, text("q's dtype, ", dtype_text(q.dtype)), dtype_text(input.dtype));
  expect_same_device(input, q);
  expect_unit_last_stride(input);
}

void expect_hint(const char* name, std::optional<int64_t> max_seqlen) {
  MLA_EXPECT(!max_seqlen || *max_seqlen >= 0, name, "0 or above", *max_seqlen);
}

Descale descale(const char* name, const std::optional<Tensor>& tensor, const Argument& q) {
  if (!tensor) return {};
  const Argument factors(name, *tensor);
  const int64_t num_heads = q.size(1);
  MLA_EXPECT(q.dtype == ScalarType::Float8_e4m3fn, name,
             text("None for ", dtype_text(q.dtype), " inputs (it is the factor of float8_e4m3fn ones)"), "a tensor");
  expect_dtype(factors, ScalarType::Float);
  expect_same_device(factors, q);
  const bool is_one = factors.numel() == 1;
  MLA_EXPECT(is_one || (factors.dim == 1 && factors.size(0) == num_heads), name,
             text("one value, or one per head: [", num_heads, "]"), shape_text(factors));
  return {const_data<float>(factors), is_one ? 0 : factors.stride(0)};
}

// k_pe as [total_k, 1, rope] or [total_k, rope], shared by the heads.
ConstRows shared_key(const Tensor& tensor, const Argument& q, const Argument& k, int64_t rope) {
  const Argument k_pe("k_pe", tensor);
  MLA_EXPECT(k_pe.dtype == q.dtype, "k_pe", text("q's dtype, ", dtype_text(q.dtype)), dtype_text(k_pe.dtype));
  expect_same_device(k_pe, q);
  if (k_pe.dim == 3) {
    expect_shape(k_pe, {k.size(0), 1, rope}, "[total_k, 1, q.shape[2] - k.shape[2]]");
  } else {
    expect_shape(k_pe, {k.size(0), rope}, "[total_k, q.shape[2] - k.shape[2]]");
  }
  expect_unit_last_stride(k_pe);
  return {const_data<void>(k_pe), k_pe.stride(0), 0};
}

struct Lengths {
  const int32_t *q, *k;  // [batch + 1]
  int32_t batch;
};

// On the device of `rows` where they are known.
Lengths check_lengths(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const Argument* rows) {
  const Argument q("cu_seqlens_q", cu_seqlens_q), k("cu_seqlens_k", cu_seqlens_k);
  const int64_t batch = q.numel() - 1;
  MLA_EXPECT(batch >= 0, "cu_seqlens_q", "batch + 1 entries, at least one", "none");
  expect_int32_vector(q, batch + 1, "[batch + 1]");
  expect_int32_vector(k, batch + 1, "[batch + 1] of cu_seqlens_q");
  if (rows) expect_same_device(q, *rows);
  expect_same_device(k, rows ? *rows : q);
  return {const_data<int32_t>(q), const_data<int32_t>(k), (int32_t)batch};
}

}  // namespace

PrefillParams check_prefill(const PrefillArguments& args) {
  const Argument q("q", args.q), k("k", args.k), v("v", args.v);
  const std::optional<DType> dtype = kernel_dtype(q.dtype);
  MLA_EXPECT(dtype, "q", "float32, bfloat16, float16 or float8_e4m3fn", dtype_text(q.dtype));
  expect_input(q, q, "[total_q, num_heads, qk_head_dim]");
  const int64_t total_q = q.size(0), num_heads = q.size(1), dim_qk = q.size(2);
  MLA_EXPECT(num_heads >= 1 && dim_qk >= 1, "q", "at least one head and one element per head", shape_text(q));

  expect_input(k, q, "[total_k, num_heads, qk_head_dim or qk_nope_head_dim]");
  const int64_t total_k = k.size(0), dim_k = k.size(2);
  MLA_EXPECT(k.size(1) == num_heads, "k", text("q's ", num_heads, " heads"), shape_text(k));
  if (args.k_pe) {
    MLA_EXPECT(dim_k >= 1 && dim_k < dim_qk, "k", text("1 to ", dim_qk - 1, " elements per head beside k_pe"),
               shape_text(k));
  } else {
    MLA_EXPECT(dim_k == dim_qk, "k", text("q's ", dim_qk, " elements per head (or k_pe with the rest)"), shape_text(k));
  }
  expect_input(v, q, "[total_k, num_heads, v_head_dim]");
  const int64_t dim_v = v.size(2);
  MLA_EXPECT(v.size(0) == total_k && v.size(1) == num_heads && dim_v >= 1, "v",
             text("shape [total_k, num_heads, v_head_dim] = [", total_k, ", ", num_heads, ", at least 1]"),
             shape_text(v));

  const Lengths lengths = check_lengths(args.cu_seqlens_q, args.cu_seqlens_k, &q);
  MLA_EXPECT(std::isfinite((float)args.scale * kLog2E), "scale", "a finite number that float32 holds times log2(e)",
             args.scale);
  expect_hint("max_seqlen_q", args.max_seqlen_q);
  expect_hint("max_seqlen_k", args.max_seqlen_k);

  PrefillParams params;
  const Argument out("out", args.out);
  const ScalarType out_dtype = dtype == DType::kFloat8E4M3 ? ScalarType::BFloat16 : q.dtype;
  expect_dtype(out, out_dtype);
  expect_shape(out, {total_q, num_heads, dim_v}, "[total_q, num_heads, v_head_dim]");
  expect_same_device(out, q);
  expect_unit_last_stride(out);
  expect_no_overlap(out);
  MLA_EXPECT(args.lse || !args.accumulate, "lse", "the running state's lse with accumulate=True", "None");
  if (args.lse) {
    const Argument lse("lse", *args.lse);
    expect_dtype(lse, ScalarType::Float);
    expect_shape(lse, {num_heads, total_q}, "[num_heads, total_q]");
    expect_same_device(lse, q);
    expect_no_overlap(lse);
    params.lse = {mutable_data<float>(lse), lse.stride(0), lse.stride(1)};
  }
  if (args.plan) {
    const Argument plan("plan", *args.plan);
    expect_dtype(plan, ScalarType::Int);
    MLA_EXPECT(plan.is_dense_vector(), "plan", "a dense vector made by plan_prefill",
               text(shape_text(plan), " with ", stride_text(plan)));
    expect_same_device(plan, q);
  }

  params.q = const_rows(q);
  params.k = const_rows(k);
  if (args.k_pe) params.k_pe = shared_key(*args.k_pe, q, k, dim_qk - dim_k);
  params.v = const_rows(v);
  params.out = rows(out);
  params.cu_seqlens_q = lengths.q;
  params.cu_seqlens_k = lengths.k;
  params.batch = lengths.batch;
  params.num_heads = (int32_t)num_heads;
  params.total_q = total_q;
  params.total_k = total_k;
  params.dim_qk = (int32_t)dim_qk;
  params.dim_k = (int32_t)dim_k;
  params.dim_v = (int32_t)dim_v;
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
  const Lengths lengths = check_lengths(cu_seqlens_q, cu_seqlens_k, nullptr);
  MLA_EXPECT(num_heads >= 1 && num_heads <= std::numeric_limits<int32_t>::max(), "num_heads", "1 or above", num_heads);
  MLA_EXPECT(dim_nope >= 1 && dim_rope >= 0 && dim_v >= 1, "head_dims", "(nope >= 1, rope >= 0, v >= 1)",
             text("(", dim_nope, ", ", dim_rope, ", ", dim_v, ")"));
  const std::optional<DType> kernel = kernel_dtype(dtype);
  MLA_EXPECT(kernel, "dtype", "float32, bfloat16, float16 or float8_e4m3fn", dtype_text(dtype));
  MLA_EXPECT(max_tokens_q >= 0, "max_tokens_q", "0 or above", max_tokens_q);

  return {lengths.q,          lengths.k, lengths.batch,
          (int32_t)num_heads, causal,    (dim_nope + dim_rope + dim_v) * size_of(*kernel)};
}

}  // namespace mla_prefill::ops
