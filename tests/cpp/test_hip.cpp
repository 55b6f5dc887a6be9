#include <string>

#include "arguments.h"
#include "check.h"
#include "hip/arguments.h"
#include "hip/config.h"

using mla_prefill::DType;
using mla_prefill::g_memory;
using mla_prefill::good;
using mla_prefill::names;
using mla_prefill::PrefillParams;
using mla_prefill::with;
namespace hip = mla_prefill::hip;

namespace {

bool refused(const PrefillParams& p, const std::string& argument) { return names(hip::supports(p), argument, "hip"); }

void test_supports() {
  CHECK(hip::supports(good()).empty());
  CHECK(hip::supports(with([](auto& p) { p.dtype = DType::kFloat16; })).empty());
  CHECK(refused(with([](auto& p) { p.dtype = DType::kFloat32; }), "q"));
  CHECK(refused(with([](auto& p) { p.dtype = DType::kFloat8E4M3; }), "q"));
  CHECK(refused(with([](auto& p) { p.dim_qk = 256; }), "head dims"));
  CHECK(refused(with([](auto& p) { p.dim_k = 96; }), "head dims"));
  CHECK(refused(with([](auto& p) { p.dim_v = 256; }), "head dims"));
  CHECK(refused(with([](auto& p) { p.scale = 0.0f; }), "scale"));
  CHECK(refused(with([](auto& p) { p.scale = -1.0f; }), "scale"));
}

void test_memory() {
  CHECK(hip::supports(with([](auto& p) { p.q.data = g_memory + 2; })).empty());
  CHECK(refused(with([](auto& p) { p.q.data = g_memory + 1; }), "q"));
  CHECK(refused(with([](auto& p) { p.k.row_stride += 1; }), "k"));
  CHECK(refused(with([](auto& p) { p.k_pe.row_stride += 1; }), "k_pe"));
  CHECK(refused(with([](auto& p) { p.v.head_stride += 1; }), "v"));
  CHECK(refused(with([](auto& p) { p.out.head_stride += 1; }), "out"));
  CHECK(hip::supports(with([](auto& p) { p.k.row_stride = 0; })).empty());
  CHECK(refused(with([](auto& p) { p.k.row_stride = 126; }), "k"));  // rows that overlap
  CHECK(hip::supports(with([](auto& p) { p.v.row_stride = hip::kMaxRowStride; })).empty());
  CHECK(refused(with([](auto& p) { p.v.row_stride = hip::kMaxRowStride + 2; }), "v"));
  CHECK(hip::supports(with([](auto& p) { p.k.head_stride = (int64_t)1 << 40; })).empty());
}

// Strides that nothing steps over are free.
void test_single_rows_and_heads() {
  CHECK(hip::supports(with([](auto& p) { p.total_q = 1, p.q.row_stride = 7, p.out.row_stride = 3; })).empty());
  CHECK(hip::supports(with([](auto& p) { p.num_heads = 1, p.k.head_stride = 33; })).empty());
  CHECK(hip::normalised(with([](auto& p) { p.total_k = 1, p.v.row_stride = 7; })).v.row_stride == 128);
}

void test_keys_in_one_tensor() {
  const PrefillParams joined = with([](auto& p) {
    p.k = {g_memory, 5 * 192, 192};
    p.k_pe = {};
    p.dim_k = 192;
  });
  CHECK(hip::supports(joined).empty());
  const PrefillParams p = hip::normalised(joined);
  CHECK(p.k_pe.data == g_memory + 128 && p.k_pe.row_stride == 5 * 192 && p.k_pe.head_stride == 192);
  CHECK(hip::normalised(good()).k_pe.data == g_memory && hip::normalised(good()).k_pe.head_stride == 0);
}

}  // namespace

int main() {
  test_supports();
  test_memory();
  test_single_rows_and_heads();
  test_keys_in_one_tensor();
  return report("hip");
}
