// The CPU kernel against a naive double reference, on every instruction set of this machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/cpu.h"
#include "plan/plan.h"

namespace {

using namespace mla_prefill;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

int failures = 0;

#define CHECK(condition, ...)                                                     \
  do {                                                                            \
    if (!(condition)) {                                                           \
      ++failures;                                                                 \
      std::printf("%s:%d [%s] %s: ", __FILE__, __LINE__, cpu::isa(), #condition); \
      std::printf(__VA_ARGS__);                                                   \
      std::printf("\n");                                                          \
    }                                                                             \
  } while (false)

// ---- Number formats, written independently of the kernel's
// -----------------------------------------------------------

struct Format {
  int exponent_bits, mantissa_bits;
};

Format format_of(DType dtype) {
  return dtype == DType::kFloat16 ? Format{5, 10} : dtype == DType::kBFloat16 ? Format{8, 7} : Format{4, 3};
}

double decode(uint32_t code, Format f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = (code >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int mantissa = code & ((1 << f.mantissa_bits) - 1);
  const double sign = code >> (f.exponent_bits + f.mantissa_bits) ? -1.0 : 1.0;
  const bool top = exponent == (1 << f.exponent_bits) - 1;
  if (f.exponent_bits == 4) {
    if (top && mantissa == 7) return kNaN;
  } else if (top) {
    return mantissa ? kNaN : sign * kInf;
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

// Round to nearest even, for values in the format's range.
uint32_t encode(double x, Format f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const uint32_t sign = std::signbit(x) ? 1u << (f.exponent_bits + f.mantissa_bits) : 0;
  const uint32_t top = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
  if (std::isnan(x)) return f.exponent_bits == 4 ? 0x7f : top | (1u << (f.mantissa_bits - 1));
  if (std::isinf(x)) return sign | top;
  int exponent = x == 0 ? 1 - bias : std::max(std::ilogb(x), 1 - bias);
  const uint32_t units = (uint32_t)std::nearbyint(std::ldexp(std::fabs(x), f.mantissa_bits - exponent));
  return sign | (((uint32_t)(exponent + bias - 1) << f.mantissa_bits) + units);
}

std::vector<double> all_numbers(DType dtype) {
  std::vector<double> numbers(dtype == DType::kFloat8E4M3 ? 256 : 65536);
  for (size_t code = 0; code < numbers.size(); ++code) numbers[code] = decode((uint32_t)code, format_of(dtype));
  return numbers;
}

double get(const void* data, int64_t i, DType dtype) {
  static const std::vector<double> bfloat16 = all_numbers(DType::kBFloat16);
  static const std::vector<double> float16 = all_numbers(DType::kFloat16);
  static const std::vector<double> float8 = all_numbers(DType::kFloat8E4M3);
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(data)[i];
    case DType::kBFloat16: return bfloat16[static_cast<const uint16_t*>(data)[i]];
    case DType::kFloat16: return float16[static_cast<const uint16_t*>(data)[i]];
    default: return float8[static_cast<const uint8_t*>(data)[i]];
  }
}

void set(void* data, int64_t i, DType dtype, double x) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(data)[i] = (float)x; break;
    case DType::kFloat8E4M3: static_cast<uint8_t*>(data)[i] = (uint8_t)encode(x, format_of(dtype)); break;
    default: static_cast<uint16_t*>(data)[i] = (uint16_t)encode(x, format_of(dtype));
  }
}

const char* name_of(DType dtype) {
  const char* names[] = {"float32", "bfloat16", "float16", "float8_e4m3fn"};
  return names[(int)dtype];
}

DType output_of(DType dtype) { return dtype == DType::kFloat8E4M3 ? DType::kBFloat16 : dtype; }

// ---- A problem that owns its tensors
// ----------------------------------------------------------------------------------

// [rows, heads, dim] in a buffer that ends with its last element (so that a sanitizer sees reads behind it). What the
// strides skip is NaN.
struct Tensor {
  std::vector<unsigned char> bytes;
  DType dtype;
  int64_t rows, heads, dim, offset, row_stride, head_stride;

  Tensor(DType dtype, int64_t rows, int64_t heads, int64_t dim, int64_t offset, int64_t row_stride, int64_t head_stride)
      : dtype(dtype),
        rows(rows),
        heads(heads),
        dim(dim),
        offset(offset),
        row_stride(row_stride),
        head_stride(head_stride) {
    const int64_t size = offset + (rows ? (rows - 1) * row_stride + (heads - 1) * head_stride + dim : 0);
    bytes.resize(size * size_of(dtype));
    for (int64_t i = 0; i < size; ++i) put_at(i, kNaN);
  }
  void put_at(int64_t i, double x) { set(bytes.data(), i, dtype, x); }
  int64_t index(int64_t row, int64_t head, int64_t d) const {
    return offset + row * row_stride + head * head_stride + d;
  }
  double at(int64_t row, int64_t head, int64_t d) const { return get(bytes.data(), index(row, head, d), dtype); }
  void put(int64_t row, int64_t head, int64_t d, double x) { put_at(index(row, head, d), x); }
  void* data() { return bytes.data() + offset * size_of(dtype); }
  ConstRows in() { return {data(), row_stride, head_stride}; }
  Rows out() { return {data(), row_stride, head_stride}; }
};

enum class Layout { kPacked, kStrided, kHeadsFirst };

Tensor make_tensor(Layout layout, DType dtype, int64_t rows, int64_t heads, int64_t dim) {
  switch (layout) {
    case Layout::kPacked: return Tensor(dtype, rows, heads, dim, 0, heads * dim, dim);
    case Layout::kStrided: return Tensor(dtype, rows, heads, dim, 5, heads * (dim + 7) + 3, dim + 7);
    default: return Tensor(dtype, rows, heads, dim, 1, dim, rows * dim);
  }
}

struct Spec {
  std::vector<int32_t> len_q, len_k;
  int heads = 2;
  int nope = 128, rope = 64, dim_v = 128;
  bool split = true;
  bool causal = true;
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kPacked;
  double magnitude = 1.0;  // of q and k
  float scale = 0.0f;      // 0: 1 / sqrt(dim_qk)
  int first_row = 0;       // cu_seqlens[0]; as many rows follow the last sequence

  std::string text() const {
    std::string s = std::string(name_of(dtype)) + (causal ? " causal" : " full") + (split ? " split" : " joined") +
                    " heads " + std::to_string(heads) + " dims " + std::to_string(nope) + "/" + std::to_string(rope) +
                    "/" + std::to_string(dim_v) + " layout " + std::to_string((int)layout) + " lengths";
    for (size_t i = 0; i < len_q.size() && i < 12; ++i) {
      s += " " + std::to_string(len_q[i]) + "x" + std::to_string(len_k[i]);
    }
    return s;
  }
};

std::vector<int32_t> cumulate(const std::vector<int32_t>& lengths, int32_t first) {
  std::vector<int32_t> cu = {first};
  for (const int32_t n : lengths) cu.push_back(cu.back() + n);
  return cu;
}

struct Problem {
  Spec spec;
  std::vector<int32_t> cu_q, cu_k;
  int64_t total_q, total_k;
  Tensor q, k, k_pe, v, out;
  std::vector<float> lse;
  bool lse_by_row = false;  // lse is the transpose of a [rows, heads] buffer
  float scale;
  PrefillParams params;

  explicit Problem(const Spec& s, uint32_t seed = 0)
      : spec(s),
        cu_q(cumulate(s.len_q, s.first_row)),
        cu_k(cumulate(s.len_k, s.first_row)),
        total_q(cu_q.back() + s.first_row),
        total_k(cu_k.back() + s.first_row),
        q(make_tensor(s.layout, s.dtype, total_q, s.heads, s.nope + s.rope)),
        k(make_tensor(s.layout, s.dtype, total_k, s.heads, s.nope + (s.split ? 0 : s.rope))),
        k_pe(make_tensor(s.layout, s.dtype, total_k, 1, s.rope)),
        v(make_tensor(s.layout, s.dtype, total_k, s.heads, s.dim_v)),
        out(make_tensor(s.layout, output_of(s.dtype), total_q, s.heads, s.dim_v)),
        lse(total_q * s.heads, -7.0f),
        lse_by_row(s.layout == Layout::kStrided),
        scale(s.scale != 0 ? s.scale : 1.0f / std::sqrt((float)(s.nope + s.rope))) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](Tensor& t, int64_t begin, int64_t end, double magnitude) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t head = 0; head < t.heads; ++head)
          for (int64_t d = 0; d < t.dim; ++d) t.put(row, head, d, magnitude * normal(rng));
    };
    fill(q, cu_q.front(), cu_q.back(), s.magnitude);
    fill(k, cu_k.front(), cu_k.back(), s.magnitude);
    fill(k_pe, cu_k.front(), cu_k.back(), s.magnitude);
    fill(v, cu_k.front(), cu_k.back(), 1.0);
  }

  double key(int64_t row, int head, int d) const {
    return d < k.dim ? k.at(row, head, d) : k_pe.at(row, 0, d - (int)k.dim);
  }
  float& lse_at(int64_t row, int head) { return lse[lse_by_row ? row * spec.heads + head : head * total_q + row]; }

  PrefillParams& refresh() {
    PrefillParams& p = params;
    p.q = q.in();
    p.k = k.in();
    if (spec.split && spec.rope) p.k_pe = {k_pe.data(), k_pe.row_stride, 0};
    p.v = v.in();
    p.out = out.out();
    p.lse = lse_by_row ? Lse{lse.data(), 1, spec.heads} : Lse{lse.data(), total_q, 1};
    p.cu_seqlens_q = cu_q.data();
    p.cu_seqlens_k = cu_k.data();
    p.batch = (int32_t)spec.len_q.size();
    p.num_heads = spec.heads;
    p.total_q = total_q;
    p.total_k = total_k;
    p.dim_qk = spec.nope + spec.rope;
    p.dim_k = (int32_t)k.dim;
    p.dim_v = spec.dim_v;
    p.scale = scale;
    p.causal = spec.causal;
    p.dtype = spec.dtype;
    p.out_dtype = out.dtype;
    return p;
  }
};

Parallel threads(int n) {
  return {n, [](int64_t size, const std::function<void(int64_t, int64_t)>& body) {
            std::vector<std::thread> workers;
            for (int64_t i = 0; i < size; ++i) workers.emplace_back([&body, i] { body(i, i + 1); });
            for (std::thread& worker : workers) worker.join();
          }};
}

void run_planned(const PrefillParams& params, const plan::Config& config, int num_threads) {
  const std::string reason = cpu::supports(params);
  CHECK(reason.empty(), "%s", reason.c_str());
  if (!reason.empty()) return;
  plan::Problem problem;
  problem.cu_seqlens_q = params.cu_seqlens_q;
  problem.cu_seqlens_k = params.cu_seqlens_k;
  problem.batch = params.batch;
  problem.num_heads = params.num_heads;
  problem.causal = params.causal;
  problem.bytes_per_key = (params.dim_qk + params.dim_v) * size_of(params.dtype);
  const std::vector<plan::WorkItem> items = plan::make_items(config, problem);
  cpu::run(params, items.data(), (int64_t)items.size(), threads(num_threads));
}

void run(Problem& problem, int num_threads = 2) { run_planned(problem.refresh(), cpu::plan_config(), num_threads); }

// ---- The reference
// ----------------------------------------------------------------------------------------------------

struct Row {
  std::vector<double> out;
  double lse;
};

Row reference(const Problem& p, int seq, int64_t i, int head, double qk_factor = 1, double v_factor = 1) {
  const int64_t len_q = p.cu_q[seq + 1] - p.cu_q[seq], len_k = p.cu_k[seq + 1] - p.cu_k[seq];
  const int64_t keys = p.spec.causal ? std::min(len_k, std::max<int64_t>(0, i + 1 + len_k - len_q)) : len_k;
  Row row = {std::vector<double>(p.spec.dim_v, 0.0), -kInf};
  if (keys == 0) return row;
  std::vector<double> logits(keys);
  double top = -kInf;
  for (int64_t j = 0; j < keys; ++j) {
    double dot = 0;
    for (int d = 0; d < p.spec.nope + p.spec.rope; ++d) {
      dot += p.q.at(p.cu_q[seq] + i, head, d) * p.key(p.cu_k[seq] + j, head, d);
    }
    logits[j] = p.scale * qk_factor * dot;
    top = std::max(top, logits[j]);
  }
  double sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const double weight = std::exp(logits[j] - top);
    sum += weight;
    for (int d = 0; d < p.spec.dim_v; ++d) row.out[d] += weight * p.v.at(p.cu_k[seq] + j, head, d);
  }
  for (double& x : row.out) x *= v_factor / sum;
  row.lse = top + std::log(sum);
  return row;
}

double tolerance_of(DType out_dtype) {
  return out_dtype == DType::kFloat32 ? 2e-6 : out_dtype == DType::kFloat16 ? 6e-4 : 4.5e-3;
}

// Everything inside the sequences right, everything outside untouched.
void compare(Problem& p, double tolerance, double qk_factor = 1, double v_factor = 1) {
  const std::string text = p.spec.text();
  std::vector<bool> owned(p.out.bytes.size() / size_of(p.out.dtype), false);
  for (int seq = 0; seq < (int)p.spec.len_q.size(); ++seq) {
    for (int64_t i = 0; i < p.spec.len_q[seq]; ++i) {
      for (int head = 0; head < p.spec.heads; ++head) {
        const Row want = reference(p, seq, i, head, qk_factor, v_factor);
        const int64_t row = p.cu_q[seq] + i;
        double error = 0, size = 1;
        for (int d = 0; d < p.spec.dim_v; ++d) {
          owned[p.out.index(row, head, d)] = true;
          const double difference = std::fabs(p.out.at(row, head, d) - want.out[d]);
          error = difference <= error ? error : difference;  // keeps NaN
          size = std::max(size, std::fabs(want.out[d]));
        }
        CHECK(error <= tolerance * size, "out off by %g at sequence %d row %d head %d: %s", error, seq, (int)i, head,
              text.c_str());
        if (want.lse == -kInf) CHECK(error == 0, "out of an empty row is not 0: %s", text.c_str());
        const double lse = p.lse_at(row, head);
        CHECK(want.lse == -kInf ? lse == -kInf : std::fabs(lse - want.lse) <= 3e-6 * std::max(1.0, std::fabs(want.lse)),
              "lse %g, expected %g, at sequence %d row %d head %d: %s", lse, want.lse, seq, (int)i, head, text.c_str());
        if (failures > 20) std::exit(1);
      }
    }
  }
  int64_t spoiled = 0;
  for (size_t i = 0; i < owned.size(); ++i)
    spoiled += !owned[i] && !std::isnan(get(p.out.bytes.data(), i, p.out.dtype));
  CHECK(spoiled == 0, "%d elements outside the sequences written: %s", (int)spoiled, text.c_str());
  for (int64_t row = 0; row < p.total_q; ++row) {
    if (row >= p.cu_q.front() && row < p.cu_q.back()) continue;
    for (int head = 0; head < p.spec.heads; ++head) CHECK(p.lse_at(row, head) == -7.0f, "lse of row %d", (int)row);
  }
}

void check_spec(const Spec& spec) {
  Problem problem(spec);
  run(problem);
  compare(problem, tolerance_of(problem.out.dtype));
}

// ---- Tests
// ------------------------------------------------------------------------------------------------------------

const DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3};

void test_ragged() {
  Spec spec;
  spec.len_q = {0, 1, 5, 32, 33, 0, 100, 17, 16, 1, 40, 2, 0};
  spec.len_k = {7, 1, 0, 32, 40, 0, 97, 17, 200, 193, 12, 5, 3};
  spec.first_row = 2;  // and NaN in the rows before and behind
  for (const DType dtype : kDTypes) {
    for (const bool causal : {true, false}) {
      for (const bool split : {true, false}) {
        spec.dtype = dtype;
        spec.causal = causal;
        spec.split = split;
        check_spec(spec);
      }
    }
  }
}

void test_several_query_tiles() {
  Spec spec;
  spec.len_q = {530, 300};
  spec.len_k = {530, 21};
  spec.heads = 1;
  spec.nope = 16;
  spec.rope = 8;
  spec.dim_v = 16;
  for (const bool causal : {true, false}) {
    spec.causal = causal;
    check_spec(spec);
  }
}

void test_dims() {
  const int dims[][3] = {{1, 0, 1},      {3, 2, 5},     {17, 7, 33},   {20, 12, 16},
                         {192, 64, 256}, {64, 64, 128}, {256, 0, 256}, {16, 1, 15}};
  for (const auto& d : dims) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool split : {true, false}) {
        Spec spec;
        spec.len_q = {37, 3};
        spec.len_k = {50, 101};
        spec.first_row = 1;
        spec.nope = d[0];
        spec.rope = d[1];
        spec.dim_v = d[2];
        spec.dtype = dtype;
        spec.split = split;
        check_spec(spec);
      }
    }
  }
}

void test_strides_and_heads() {
  for (const Layout layout : {Layout::kStrided, Layout::kHeadsFirst}) {
    for (const int heads : {1, 3, 5, 12}) {
      Spec spec;
      spec.len_q = {20, 1, 35};
      spec.len_k = {20, 30, 98};
      spec.heads = heads;
      spec.layout = layout;
      spec.dtype = DType::kBFloat16;
      check_spec(spec);
    }
  }
}

void test_empty_batch() {
  Spec spec;
  check_spec(spec);
  spec.len_q = {0, 0};
  spec.len_k = {0, 9};
  check_spec(spec);
}

void test_lse_is_optional() {
  Spec spec;
  spec.len_q = spec.len_k = {40};
  Problem problem(spec);
  problem.refresh().lse = {};
  run_planned(problem.params, cpu::plan_config(), 1);
  Problem with_lse(spec);
  run(with_lse);
  CHECK(problem.out.bytes == with_lse.out.bytes, "out depends on lse");
}

// Rows of other sequences hold NaN and inf; the lengths make every tail of rows and keys touch them.
void test_neighbours() {
  for (const DType dtype : kDTypes) {
    for (const bool causal : {true, false}) {
      Spec spec;
      spec.len_q = {3, 21, 3, 9, 3};
      spec.len_k = {3, 30, 3, 99, 3};
      spec.dtype = dtype;
      spec.causal = causal;
      Problem clean(spec), dirty(spec);
      for (const int seq : {0, 2, 4}) {
        for (int64_t i = 0; i < 3; ++i) {
          for (int head = 0; head < spec.heads; ++head) {
            const double poison = i == 1 && dtype != DType::kFloat8E4M3 ? kInf : kNaN;
            for (int d = 0; d < 192; ++d) dirty.q.put(dirty.cu_q[seq] + i, head, d, poison);
            for (int d = 0; d < 128; ++d) dirty.k.put(dirty.cu_k[seq] + i, head, d, poison);
            for (int d = 0; d < 128; ++d) dirty.v.put(dirty.cu_k[seq] + i, head, d, poison);
          }
        }
      }
      run(clean);
      run(dirty);
      for (const int seq : {1, 3}) {
        for (int64_t row = clean.cu_q[seq]; row < clean.cu_q[seq + 1]; ++row) {
          for (int head = 0; head < spec.heads; ++head) {
            for (int d = 0; d < spec.dim_v; ++d) {
              CHECK(clean.out.at(row, head, d) == dirty.out.at(row, head, d), "%s", spec.text().c_str());
            }
            CHECK(clean.lse_at(row, head) == dirty.lse_at(row, head), "%s", spec.text().c_str());
          }
        }
      }
    }
  }
}

// What an earlier call left in a thread's scratch never shows, not even where a row sees no key.
void test_dirty_scratch() {
  Spec spec;
  spec.len_q = spec.len_k = {60};
  Problem dirty(spec);
  for (int64_t row = 0; row < 60; ++row) {
    for (int head = 0; head < spec.heads; ++head) {
      for (int d = 0; d < spec.dim_v; ++d) dirty.v.put(row, head, d, kNaN);
    }
  }
  run(dirty, 1);
  spec.len_q = {60, 50, 7};
  spec.len_k = {0, 3, 40};
  Problem clean(spec);
  run(clean, 1);
  compare(clean, tolerance_of(clean.out.dtype));
}

// One dim, so that the logits themselves are exact in float.
void test_large_logits() {
  for (const float scale : {1.0f, -1.0f, 100.0f}) {
    Spec spec;
    spec.nope = 1;
    spec.rope = 0;
    spec.dim_v = 4;
    spec.len_q = {40, 40};
    spec.len_k = {130, 20};
    spec.magnitude = scale == 100.0f ? 30.0 : 300.0;  // logits of about +-1e5
    spec.scale = scale;
    Problem problem(spec);
    for (Tensor* t : {&problem.q, &problem.k}) {
      for (int64_t row = 0; row < t->rows; ++row) {
        for (int head = 0; head < spec.heads; ++head) t->put(row, head, 0, std::nearbyint(t->at(row, head, 0)));
      }
    }
    run(problem);
    compare(problem, 0.02);  // logits of 1e5 have a last place of 0.008 in base 2
  }
}

void test_descales() {
  for (const int64_t head_stride : {0, 1}) {
    Spec spec;
    spec.len_q = {33};
    spec.len_k = {70};
    spec.dtype = DType::kFloat8E4M3;
    const float q_scale[] = {0.5f, 0.5f}, k_scale[] = {1.5f, 1.5f}, v_scale[] = {3.0f, 3.0f};
    Problem problem(spec);
    problem.refresh();
    problem.params.q_descale = {q_scale, head_stride};
    problem.params.k_descale = {k_scale, head_stride};
    problem.params.v_descale = {v_scale, head_stride};
    run_planned(problem.params, cpu::plan_config(), 1);
    compare(problem, tolerance_of(problem.out.dtype), 0.75, 3.0);
  }
}

// Every number of a format comes back through attention over one key, and the mean of neighbours rounds to even.
void test_number_formats() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    Spec spec;
    spec.heads = 1;
    spec.nope = 8;
    spec.rope = 0;
    spec.dim_v = dtype == DType::kFloat8E4M3 ? 256 : 65536;
    spec.dtype = dtype;
    spec.len_q = spec.len_k = {1};
    spec.causal = false;
    Problem one(spec);
    const auto write_code = [&](Problem& p, int64_t row, int code, int d) {
      const int64_t at = p.v.index(row, 0, d);
      if (dtype == DType::kFloat8E4M3)
        p.v.bytes[at] = (uint8_t)code;
      else
        reinterpret_cast<uint16_t*>(p.v.bytes.data())[at] = (uint16_t)code;
    };
    for (int code = 0; code < spec.dim_v; ++code) write_code(one, 0, code, code);
    run(one);
    int wrong = 0;
    for (int code = 0; code < spec.dim_v; ++code) {
      const double want = one.v.at(0, 0, code), got = one.out.at(0, 0, code);
      wrong += std::isnan(want) ? !std::isnan(got) : want != got;
    }
    CHECK(wrong == 0, "%d numbers of %s don't come back", wrong, name_of(dtype));
    if (dtype == DType::kFloat8E4M3) continue;

    spec.len_k = {2};
    Problem two(spec);
    for (int d = 0; d < 8; ++d) two.k.put(1, 0, d, two.k.at(0, 0, d));  // equal weights
    for (int code = 0; code < spec.dim_v; ++code) {
      write_code(two, 0, code, code);
      write_code(two, 1, (code & 0x7fff) == 0x7fff ? code : code + 1, code);
    }
    run(two);
    wrong = 0;
    for (int code = 0; code < spec.dim_v; ++code) {
      const double a = two.v.at(0, 0, code), b = two.v.at(1, 0, code);
      if (!std::isfinite(a + b) || std::fabs(a + b) > 3e38) continue;  // the float sum overflows
      const double want = decode(encode((a + b) / 2, format_of(dtype)), format_of(dtype));
      const bool tiny = dtype == DType::kBFloat16 && std::fabs(a) < 1e-37;  // halving a float subnormal is inexact
      wrong += !tiny && want != two.out.at(0, 0, code);
    }
    CHECK(wrong == 0, "%d means of neighbours in %s round wrongly", wrong, name_of(dtype));
  }
}

void test_bitwise_stability() {
  Spec spec;
  spec.len_q = {30, 300, 1, 64, 7};
  spec.len_k = {40, 300, 500, 64, 3};
  spec.heads = 5;
  spec.dtype = DType::kBFloat16;
  Problem batch(spec), again(spec), grouped(spec);
  run(batch, 1);
  run(again, 3);
  CHECK(batch.out.bytes == again.out.bytes && batch.lse == again.lse, "1 and 3 threads differ");

  plan::Config config = cpu::plan_config();
  config.min_item_cost = 1 << 20;  // all heads of a sequence's query tile in one item
  run_planned(grouped.refresh(), config, 2);
  CHECK(batch.out.bytes == grouped.out.bytes && batch.lse == grouped.lse, "heads per item change the result");

  for (size_t seq = 0; seq < spec.len_q.size(); ++seq) {
    Problem alone(spec);
    const int32_t cu_q[] = {alone.cu_q[seq], alone.cu_q[seq + 1]};
    const int32_t cu_k[] = {alone.cu_k[seq], alone.cu_k[seq + 1]};
    PrefillParams& params = alone.refresh();
    params.cu_seqlens_q = cu_q;
    params.cu_seqlens_k = cu_k;
    params.batch = 1;
    run_planned(params, cpu::plan_config(), 1);
    const int64_t row_bytes = batch.out.row_stride * 2;
    CHECK(std::memcmp(&alone.out.bytes[cu_q[0] * row_bytes], &batch.out.bytes[cu_q[0] * row_bytes],
                      (cu_q[1] - cu_q[0]) * row_bytes) == 0,
          "sequence %d differs alone", (int)seq);
  }
}

// A full prefix and then the causal new tokens, folded into one state, are the causal whole.
void test_accumulate() {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Layout layout : {Layout::kPacked, Layout::kStrided}) {
      Spec spec;
      spec.dtype = dtype;
      spec.layout = layout;
      spec.len_q = {20, 1, 40, 3};
      spec.len_k = {20 + 50, 1 + 110, 40 + 0, 3 + 9};
      const std::vector<int32_t> prefix = {50, 110, 0, 9};
      Problem whole(spec), merged(spec);
      run(whole);

      PrefillParams& params = merged.refresh();
      const std::vector<int32_t> cu_q = merged.cu_q, cu_k = merged.cu_k;
      for (int seq = 0; seq < 4; ++seq) {  // one at a time: prefix and rest are not ragged batches of their own
        const int32_t middle = cu_k[seq] + prefix[seq];
        const int32_t new_keys[] = {middle, cu_k[seq + 1]}, old_keys[] = {cu_k[seq], middle};
        params.cu_seqlens_q = &cu_q[seq];
        params.batch = 1;
        // A dead state first: its payload (NaN) must not matter.
        for (int64_t row = cu_q[seq]; row < cu_q[seq + 1]; ++row) {
          for (int head = 0; head < spec.heads; ++head) {
            merged.lse_at(row, head) = (float)(row % 2 ? kInf : -kInf);
          }
        }
        params.accumulate = true;
        params.causal = true;
        params.cu_seqlens_k = new_keys;
        run_planned(params, cpu::plan_config(), 1);
        params.causal = false;
        params.cu_seqlens_k = old_keys;
        run_planned(params, cpu::plan_config(), 1);
      }
      compare(merged, 2 * tolerance_of(merged.out.dtype));
    }
  }
}

void test_accumulate_nothing() {
  Spec spec;
  spec.len_q = {40, 5};
  spec.len_k = {0, 2};  // three rows of the second sequence see no key
  spec.dtype = DType::kBFloat16;
  Problem problem(spec);
  PrefillParams& params = problem.refresh();
  for (int64_t row = 0; row < problem.total_q; ++row) {
    for (int head = 0; head < spec.heads; ++head) {
      problem.lse_at(row, head) = 0.25f;
      for (int d = 0; d < spec.dim_v; ++d) problem.out.put(row, head, d, d - 3);
    }
  }
  params.accumulate = true;
  run_planned(params, cpu::plan_config(), 1);
  for (int64_t row = 0; row < problem.total_q; ++row) {
    for (int head = 0; head < spec.heads; ++head) {
      const bool kept = problem.lse_at(row, head) == 0.25f;
      CHECK(kept == (row < 43), "row %d", (int)row);
      for (int d = 0; row < 43 && d < spec.dim_v; ++d) CHECK(problem.out.at(row, head, d) == d - 3, "row %d", (int)row);
    }
  }
}

void test_supports() {
  Spec spec;
  Problem problem(spec);
  PrefillParams params = problem.refresh();
  CHECK(cpu::supports(params).empty(), "%s", cpu::supports(params).c_str());
  params.out_dtype = DType::kBFloat16;
  CHECK(!cpu::supports(params).empty(), "another dtype for out");
  params = problem.refresh();
  params.dim_v = 0;
  CHECK(!cpu::supports(params).empty(), "no value dims");
}

}  // namespace

int main() {
  for (const cpu::Isa& isa : cpu::isas()) {
    if (!isa.usable) {
      std::printf("%s: %s\n", isa.name, isa.reason.c_str());
      continue;
    }
    setenv("MLA_PREFILL_CPU_ISA", isa.name, 1);
    CHECK(std::strcmp(cpu::isa(), isa.name) == 0, "asked for %s", isa.name);
    test_ragged();
    test_several_query_tiles();
    test_dims();
    test_strides_and_heads();
    test_empty_batch();
    test_lse_is_optional();
    test_neighbours();
    test_dirty_scratch();
    test_large_logits();
    test_descales();
    test_number_formats();
    test_bitwise_stability();
    test_accumulate();
    test_accumulate_nothing();
    test_supports();
    std::printf("%s: %s\n", isa.name, failures ? "FAILED" : "ok");
  }
  setenv("MLA_PREFILL_CPU_ISA", "mmx", 1);
  PrefillParams params;
  params.dim_qk = params.dim_k = params.dim_v = 1;
  CHECK(cpu::supports(params).find("got mmx") != std::string::npos, "%s", cpu::supports(params).c_str());
  unsetenv("MLA_PREFILL_CPU_ISA");
  CHECK(cpu::supports(params).empty() && std::strcmp(cpu::isa(), "none") != 0, "%s", cpu::supports(params).c_str());
  return failures != 0;
}
