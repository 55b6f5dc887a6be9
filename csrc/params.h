// Plain structs that cross layers. No torch here: kernels and the C++ tests see only these.
#pragma once

#include <cstdint>

namespace mla_prefill {

constexpr float kLog2E = 1.4426950408889634f;  // from natural exponents to the kernels', whose base is 2

enum class DType : int8_t { kFloat32, kBFloat16, kFloat16, kFloat8E4M3 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2; }

// A [rows, heads, dim] tensor. Strides count elements; the stride of dim is 1.
struct ConstRows {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

struct Rows {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// A [heads, rows] float32 tensor, any strides.
struct Lse {
  float* data = nullptr;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

struct ConstLse {
  const float* data = nullptr;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// One factor for all heads (head_stride 0) or one per head (head_stride 1); nullptr means 1.
struct Descale {
  const float* data = nullptr;
  int64_t head_stride = 0;

  float of(int64_t head) const { return data ? data[head * head_stride] : 1.0f; }
};

// ragged_prefill: for sequence b with query rows [cu_seqlens_q[b], cu_seqlens_q[b+1]) and keys
// [cu_seqlens_k[b], cu_seqlens_k[b+1]), per head: out = softmax(scale * q k^T) v, lse = ln sum exp.
struct PrefillParams {
  ConstRows q;     // [total_q, num_heads, dim_qk]
  ConstRows k;     // [total_k, num_heads, dim_k]; dim_k == dim_qk (one tensor) or dim_qk - rope (split)
  ConstRows k_pe;  // [total_k, dim_qk - dim_k], shared by all heads (head_stride 0); unused when dim_k == dim_qk
  ConstRows v;     // [total_k, num_heads, dim_v]
  Rows out;        // [total_q, num_heads, dim_v]
  Lse lse;         // [num_heads, total_q], natural log of the scaled logits; data may be nullptr

  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1], 4-byte aligned, first entry may be above 0
  const int32_t* cu_seqlens_k = nullptr;  // [batch + 1]
  int32_t batch = 0;
  int32_t num_heads = 0;
  int64_t total_q = 0;
  int64_t total_k = 0;
  int32_t dim_qk = 0;
  int32_t dim_k = 0;
  int32_t dim_v = 0;

  float scale = 0.0f;
  bool causal = false;                 // bottom-right: row i of a sequence sees key j iff j <= i + Lk - Lq
  bool accumulate = false;             // out and lse hold a state; the result is merged into it
  DType dtype = DType::kBFloat16;      // of q, k, k_pe, v
  DType out_dtype = DType::kBFloat16;  // dtype, but bfloat16 for float8 inputs
  Descale q_descale, k_descale, v_descale;
  void* scratch = nullptr;  // device memory of the size that the backend asks for
};

// merge_states: out = (w_a out_a + w_b out_b) / (w_a + w_b) with w = exp(lse), lse = ln(w_a + w_b).
struct MergeParams {
  ConstRows out_a;  // [tokens, num_heads, dim_v]
  ConstLse lse_a;   // [num_heads, tokens]; +inf and -inf both mean an empty side of weight 0
  ConstRows out_b;
  ConstLse lse_b;
  Rows out;  // may alias out_a or out_b exactly
  Lse lse;   // may alias lse_a or lse_b exactly
  int64_t tokens = 0;
  int32_t num_heads = 0;
  int32_t dim_v = 0;
  DType dtype = DType::kBFloat16;
};

enum class CacheLayout : int8_t {
  kPlain,     // rows of `dim` elements in the output's dtype
  kFp8E4M3,   // rows of `dim` float8 e4m3, one scale for the whole cache
  kFp8DsMla,  // rows of 656 bytes: 512 float8 e4m3, 4 float32 scales (one per 128), 64 bfloat16
};

// gather_latent: token i of request b is row (starts[b] + i) of that request's paged cache.
struct GatherParams {
  const void* cache = nullptr;  // [num_blocks, block_size, dim]; strides in elements of the cache's dtype
  int64_t block_stride = 0;
  int64_t slot_stride = 0;
  int64_t num_blocks = 0;
  int32_t block_size = 0;
  const int32_t* block_table = nullptr;  // [batch, max_blocks]
  int64_t block_table_stride = 0;
  int32_t max_blocks = 0;
  const int32_t* cu_seqlens = nullptr;  // [batch + 1]
  const int32_t* starts = nullptr;      // [batch]
  int32_t batch = 0;
  void* out = nullptr;  // [out_rows, dim]
  int64_t out_rows = 0;
  int64_t out_stride = 0;
  int32_t dim = 0;
  CacheLayout layout = CacheLayout::kPlain;
  DType out_dtype = DType::kBFloat16;
  const float* k_scale = nullptr;  // kFp8E4M3 only; nullptr means 1
};

}  // namespace mla_prefill
