#include <algorithm>
#include <cmath>
#include <limits>

#include "context/context.h"
#include "numeric.h"

namespace mla_prefill::context {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// One row of one head. Reads before it writes, so the output may be either input.
template <typename T>
void merge_row(const T* a, float lse_a, const T* b, float lse_b, T* out, float* lse, int32_t dim) {
  if (std::isinf(lse_a)) lse_a = -kInf;  // some producers mark an empty side with +inf
  if (std::isinf(lse_b)) lse_b = -kInf;
  if (lse_a == -kInf && lse_b == -kInf) {
    std::fill(out, out + dim, from_float<T>(0.0f));
    *lse = -kInf;
  } else if (lse_b == -kInf) {  // a dead side's payload is not even read: it may be NaN
    std::copy(a, a + dim, out);
    *lse = lse_a;
  } else if (lse_a == -kInf) {
    std::copy(b, b + dim, out);
    *lse = lse_b;
  } else {
    const float top = std::max(lse_a, lse_b);
    const float exp_a = std::exp(lse_a - top), exp_b = std::exp(lse_b - top);
    const float weight_a = exp_a / (exp_a + exp_b), weight_b = exp_b / (exp_a + exp_b);
    for (int32_t i = 0; i < dim; ++i) out[i] = from_float<T>(weight_a * to_float(a[i]) + weight_b * to_float(b[i]));
    *lse = top + std::log(exp_a + exp_b);
  }
}

template <typename T>
void merge(const MergeParams& p, const Parallel& parallel) {
  parallel.run(p.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.num_heads; ++h) {
        merge_row(static_cast<const T*>(p.out_a.data) + t * p.out_a.row_stride + h * p.out_a.head_stride,
                  p.lse_a.data[h * p.lse_a.head_stride + t * p.lse_a.row_stride],
                  static_cast<const T*>(p.out_b.data) + t * p.out_b.row_stride + h * p.out_b.head_stride,
                  p.lse_b.data[h * p.lse_b.head_stride + t * p.lse_b.row_stride],
                  static_cast<T*>(p.out.data) + t * p.out.row_stride + h * p.out.head_stride,
                  &p.lse.data[h * p.lse.head_stride + t * p.lse.row_stride], p.dim_v);
      }
    }
  });
}

}  // namespace

void merge_on_cpu(const MergeParams& params, const Parallel& parallel) {
  switch (params.dtype) {
    case DType::kFloat32: return merge<float>(params, parallel);
    case DType::kBFloat16: return merge<BFloat16>(params, parallel);
    case DType::kFloat16: return merge<Float16>(params, parallel);
    case DType::kFloat8E4M3: break;  // refused by the op
  }
}

}  // namespace mla_prefill::context
