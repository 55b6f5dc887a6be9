#include "context/context.h"
#include "ops/arguments.h"

namespace mla_prefill::ops {
namespace {

ConstLse const_lse(const Tensor& lse) {
  return {static_cast<const float*>(lse.const_data_ptr()), lse.stride(0), lse.stride(1)};
}

MergeParams check(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b, const Tensor& out,
                  const Tensor& lse) {
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

void merge_states_cpu(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                      const Tensor& out, const Tensor& lse) {
  context::merge_on_cpu(check(out_a, lse_a, out_b, lse_b, out, lse), torch_parallel());
}

}  // namespace
}  // namespace mla_prefill::ops

STABLE_TORCH_LIBRARY_IMPL(mla_prefill, CPU, m) {
  m.impl("merge_states", TORCH_BOX(&mla_prefill::ops::merge_states_cpu));
}
