// The schemas of all ops, in one place. Shapes and meaning: see the Python functions of the same names.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(mla_prefill, m) {
  m.def(
      "ragged_prefill(Tensor q, Tensor k, Tensor v, Tensor? k_pe, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "float scale, bool causal, SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? plan, Tensor(a!) out, "
      "Tensor(b!)? lse, bool accumulate, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale) -> ()");
  m.def(
      "plan_prefill(Tensor cu_seqlens_q, Tensor cu_seqlens_k, int num_heads, bool causal, int dim_nope, int dim_rope, "
      "int dim_v, ScalarType dtype, SymInt max_tokens_q) -> Tensor");
  m.def("merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "gather_latent(Tensor cache, Tensor block_table, Tensor cu_seqlens, Tensor starts, Tensor(a!) out, "
      "Tensor? k_scale, str layout) -> ()");
}
