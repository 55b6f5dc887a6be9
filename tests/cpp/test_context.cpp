// Merge and gather on plain buffers. The Python tests hold the wide case tables; these show that the code stands
// without torch, and check the number formats exhaustively.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "context/context.h"
#include "numeric.h"

using namespace mla_prefill;

namespace {

const Parallel kSerial = {1, [](int64_t n, const std::function<void(int64_t, int64_t)>& body) { body(0, n); }};

void test_formats() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    for (const bool half : {false, true}) {
      const float value = half ? to_float(Float16{(uint16_t)bits}) : to_float(BFloat16{(uint16_t)bits});
      const uint16_t back = half ? from_float<Float16>(value).bits : from_float<BFloat16>(value).bits;
      CHECK(std::isnan(value) ? std::isnan(half ? to_float(Float16{back}) : to_float(BFloat16{back})) : back == bits);
    }
  }
  CHECK(to_float(Float16{0x0001}) == 0x1p-24f && to_float(Float16{0x7bff}) == 65504.0f);
  CHECK(from_float<Float16>(65519.0f).bits == 0x7bff && from_float<Float16>(65520.0f).bits == 0x7c00);
  CHECK(from_float<Float16>(0x1.8p-24f).bits == 2 && from_float<Float16>(0x1p-25f).bits == 0);  // ties to even
  CHECK(from_float<Float16>(1.0f + 0x1p-11f).bits == 0x3c00 && from_float<Float16>(1.0f + 0x3p-11f).bits == 0x3c02);
  CHECK(from_float<BFloat16>(1.0f + 0x1p-8f).bits == 0x3f80 && from_float<BFloat16>(1.0f + 0x3p-8f).bits == 0x3f82);
  CHECK(to_float(Float8E4M3{0x7e}) == 448.0f && to_float(Float8E4M3{0x81}) == -0x1p-9f);
  CHECK(std::isnan(to_float(Float8E4M3{0x7f})) && std::isnan(to_float(Float8E4M3{0xff})));
}

void test_merge() {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  // Four tokens of one head, one value each: both alive, a dead by +inf, b dead by -inf, both dead.
  std::vector<float> a = {1, kNan, 3, kNan}, lse_a = {0, kInf, 2, -kInf};
  std::vector<float> b = {2, 5, kNan, kNan}, lse_b = {std::log(3.0f), 1, -kInf, kInf};
  MergeParams p;
  p.out_a = {a.data(), 1, 1};
  p.lse_a = {lse_a.data(), 4, 1};
  p.out_b = {b.data(), 1, 1};
  p.lse_b = {lse_b.data(), 4, 1};
  p.out = {a.data(), 1, 1};  // in place
  p.lse = {lse_a.data(), 4, 1};
  p.tokens = 4;
  p.num_heads = 1;
  p.dim_v = 1;
  p.dtype = DType::kFloat32;
  context::merge_on_cpu(p, kSerial);
  CHECK(std::abs(a[0] - 1.75f) < 1e-6f && std::abs(lse_a[0] - std::log(4.0f)) < 1e-6f);
  CHECK(a[1] == 5 && lse_a[1] == 1 && a[2] == 3 && lse_a[2] == 2);
  CHECK(a[3] == 0 && lse_a[3] == -kInf);
}

void test_gather() {
  // Blocks of 2 rows of 1 value; request 0 reads positions 1..4 (one past its table), request 1 block -1 and block 9.
  std::vector<float> cache = {0, 1, 10, 11, 20, 21};
  std::vector<int32_t> table = {2, 0, -1, 9}, cu = {1, 5, 7}, starts = {1, 1};
  std::vector<float> out(8, 77);
  GatherParams p;
  p.cache = cache.data();
  p.block_stride = 2;
  p.slot_stride = 1;
  p.num_blocks = 3;
  p.block_size = 2;
  p.block_table = table.data();
  p.block_table_stride = 2;
  p.max_blocks = 2;
  p.cu_seqlens = cu.data();
  p.starts = starts.data();
  p.batch = 2;
  p.out = out.data();
  p.out_stride = 1;
  p.dim = 1;
  p.out_dtype = DType::kFloat32;
  context::gather_on_cpu(p, kSerial);
  CHECK(out == (std::vector<float>{77, 21, 0, 1, 0, 0, 0, 77}));
}

}  // namespace

int main() {
  test_formats();
  test_merge();
  test_gather();
  return report("context");
}
