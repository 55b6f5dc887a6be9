// The portable NVIDIA kernel as far as it is plain C++: what it takes, its table of tiles, which devices it is for, and
// where its elements lie. The last is run through the instructions' definitions in the PTX ISA, one warp at a time.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "arguments.h"
#include "check.h"
#include "cuda_kernels.h"
#include "sm80/arguments.h"
#include "sm80/config.h"
#include "sm80/layout.h"
#include "sm80/rows.h"

using mla_prefill::DType;
using mla_prefill::g_memory;
using mla_prefill::good;
using mla_prefill::names;
using mla_prefill::PrefillParams;
using mla_prefill::with;
namespace cuda = mla_prefill::cuda;
namespace plan = mla_prefill::plan;
namespace sm80 = mla_prefill::sm80;

namespace {

// ---- Instructions ---------------------------------------------------------------------------------------------------

constexpr int kLanes = 32;
using Element = int16_t;  // of any 16-bit type: the products are sums of small integers here
using Tile = std::vector<Element>;
using Registers = std::array<std::array<std::array<Element, 2>, 4>, kLanes>;  // of a lane, two elements each
using Accumulators = std::array<std::array<int, 4>, kLanes>;

// ldmatrix.x4: lane l passes a row of matrix l / 8. Without .trans a lane receives two elements of row lane / 4, with
// it two of column lane / 4.
Registers ldmatrix(const Tile& memory, const std::array<int, kLanes>& byte_address, bool transposed) {
  Registers result;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int e = 0; e < 2; ++e) {
        const int along = lane % 4 * 2 + e, across = lane / 4;
        const int row = transposed ? along : across, column = transposed ? across : along;
        result[lane][matrix][e] = memory[byte_address[matrix * 8 + row] / 2 + column];
      }
    }
  }
  return result;
}

// mma.m16n8k16.row.col.
void mma(Accumulators& c, const Registers& a, const std::array<std::array<Element, 4>, kLanes>& b) {
  int rows[16][16], columns[8][16];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      rows[row][in_group * 2 + (i & 1) + (i < 4 ? 0 : 8)] = a[lane][i / 2][i % 2];
    }
    for (int i = 0; i < 4; ++i) columns[group][in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)] = b[lane][i];
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
      for (int k = 0; k < 16; ++k) c[lane][i] += rows[row][k] * columns[column][k];
    }
  }
}

// The first or the second operand B in the registers of one ldmatrix.x4.
std::array<std::array<Element, 4>, kLanes> operand_b(const Registers& r, int which) {
  std::array<std::array<Element, 4>, kLanes> b;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) b[lane][i] = r[lane][2 * which + i / 2][i % 2];
  }
  return b;
}

// ---- The kernel's use of them ---------------------------------------------------------------------------------------

Element value_at(int row, int column) { return (Element)((row * 7 + column * 3 + row * column) % 11 - 5); }

template <typename Layout>
Tile make_tile(int rows) {
  Tile tile(rows * Layout::kColumns);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < Layout::kColumns; ++column) {
      tile[Layout::offset(row, column / 8) / 2 + column % 8] = value_at(row, column);
    }
  }
  return tile;
}

// Addresses of the 16 x 16 block at `row`, `step`.
template <typename Layout, typename Rows>
std::array<int, kLanes> addresses(Rows rows_of, int row, int step) {
  std::array<int, kLanes> result;
  for (int lane = 0; lane < kLanes; ++lane) {
    const sm80::MatrixRow at = rows_of(lane);
    result[lane] = Layout::at_step(Layout::offset(at.row, at.chunk), step) + row * Layout::kRowBytes;
  }
  return result;
}

// S = Q K^T, and O = S V with S as the second product's operand A: 32 rows and 32 keys.
template <int kColumnsQK, int kColumnsV>
void test_products() {
  using QK = sm80::TileLayout<kColumnsQK>;
  using V = sm80::TileLayout<kColumnsV>;
  constexpr int kKeys = 32;
  const Tile q = make_tile<QK>(32), k = make_tile<QK>(kKeys), v = make_tile<V>(kKeys);
  for (int row : {0, 16}) {
    Accumulators s[kKeys / 8] = {};
    for (int step = 0; step < kColumnsQK / 16; ++step) {
      const Registers a = ldmatrix(q, addresses<QK>(sm80::row_by_row, row, step), false);
      for (int n = 0; n < kKeys / 8; n += 2) {
        const Registers b = ldmatrix(k, addresses<QK>(sm80::column_by_column, n * 8, step), false);
        mma(s[n], a, operand_b(b, 0));
        mma(s[n + 1], a, operand_b(b, 1));
      }
    }
    int weights[16][kKeys];
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int n = 0; n < kKeys / 8; ++n) {
        for (int i = 0; i < 4; ++i) {
          const int in_tile = sm80::accumulator_row(lane, i), key = n * 8 + sm80::accumulator_column(lane, i);
          int expected = 0;
          for (int c = 0; c < kColumnsQK; ++c) expected += value_at(row + in_tile, c) * value_at(key, c);
          CHECK(s[n][lane][i] == expected);
          s[n][lane][i] %= 7;  // so that it fits an element
          weights[in_tile][key] = s[n][lane][i];
        }
      }
    }
    Accumulators o[kColumnsV / 8] = {};
    for (int step = 0; step < kKeys / 16; ++step) {
      Registers a;
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto &low = s[2 * step][lane], &high = s[2 * step + 1][lane];
        a[lane] = {{{(Element)low[0], (Element)low[1]},
                    {(Element)low[2], (Element)low[3]},
                    {(Element)high[0], (Element)high[1]},
                    {(Element)high[2], (Element)high[3]}}};
      }
      for (int n = 0; n < kColumnsV / 8; n += 2) {
        const Registers b = ldmatrix(v, addresses<V>(sm80::row_by_row, step * 16, n / 2), true);
        mma(o[n], a, operand_b(b, 0));
        mma(o[n + 1], a, operand_b(b, 1));
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int n = 0; n < kColumnsV / 8; ++n) {
        for (int i = 0; i < 4; ++i) {
          const int in_tile = sm80::accumulator_row(lane, i), column = n * 8 + sm80::accumulator_column(lane, i);
          int expected = 0;
          for (int key = 0; key < kKeys; ++key) expected += weights[in_tile][key] * value_at(key, column);
          CHECK(o[n][lane][i] == expected);
        }
      }
    }
  }
}

// Every chunk has a place of its own, steps and groups lead where they say, and neither eight rows at one chunk (a
// matrix of ldmatrix) nor the chunks that eight threads copy at once share a bank.
template <int kColumns>
void test_layout() {
  using Layout = sm80::TileLayout<kColumns>;
  constexpr int kRows = 32;
  std::set<int> places;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < Layout::kRowChunks; ++chunk) {
      const int offset = Layout::offset(row, chunk);
      CHECK(offset >= row * Layout::kRowBytes && offset < (row + 1) * Layout::kRowBytes && offset % 16 == 0);
      places.insert(offset);
      CHECK(Layout::at_step(Layout::offset(row, chunk % 2), chunk / 2) == offset);
      const int group = chunk / Layout::kGroupChunks;
      CHECK(Layout::offset(row, chunk % Layout::kGroupChunks) + group * Layout::kGroupChunks * 16 == offset);
      CHECK(Layout::offset(row % 8, chunk) + row / 8 * 8 * Layout::kRowBytes == offset);
    }
  }
  CHECK((int)places.size() == kRows * Layout::kRowChunks);
  const auto bank = [](int offset) { return offset / 16 % 8; };
  for (int chunk = 0; chunk < Layout::kRowChunks; ++chunk) {
    std::set<int> banks;
    for (int row = 0; row < 8; ++row) banks.insert(bank(Layout::offset(row, chunk)));
    CHECK(banks.size() == 8);
  }
  for (int first = 0; first < 64; first += 8) {
    std::set<int> banks;
    for (int thread = first; thread < first + 8; ++thread) {
      banks.insert(bank(Layout::offset(thread / Layout::kGroupChunks, thread % Layout::kGroupChunks)));
    }
    CHECK(banks.size() == 8);
  }
}

// ---- Copies of whole tiles ------------------------------------------------------------------------------------------

// `rows` rows of values of their own, `stride` elements apart in either direction; elsewhere is a mark.
struct Source {
  static constexpr uint16_t kMark = 0xffff;
  std::vector<uint16_t> memory;
  sm80::WholeRows rows_of_head;

  Source(int rows, int32_t stride, int columns, int salt) : memory(rows * std::abs(stride) + columns, kMark) {
    uint16_t* const first = memory.data() + (stride < 0 ? (1 - rows) * stride : 0);
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) first[row * stride + column] = value(row, column, salt);
    }
    rows_of_head = {first, stride};
  }

  static uint16_t value(int row, int column, int salt) { return (uint16_t)((row * 256 + column) * 2 + salt) % kMark; }
};

// The threads of a CTA together write each chunk of the tile once, from where it belongs.
template <int kRows, int kColumns, int kThreads, int kLeft>
void test_whole_copy(int32_t left_stride, int32_t right_stride) {
  using Whole = sm80::WholeCopy<kRows, kColumns, kThreads, kLeft>;
  using Layout = sm80::TileLayout<kColumns>;
  constexpr int kFirstRow = 3;
  constexpr uint32_t kAddress = 1 << 20;
  const Source left(kFirstRow + kRows, left_stride, kLeft, 0),
      right(kFirstRow + kRows, right_stride, kColumns - kLeft, 1);
  std::vector<uint16_t> tile(kRows * kColumns);
  std::vector<int> writes(kRows * Layout::kRowChunks);
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    Whole copy(thread, kAddress, left.rows_of_head, right.rows_of_head, kFirstRow);
    for (int round = 0; round < Whole::kRounds; ++round) {
      copy.copy_round([&](uint32_t to, const uint16_t* from) {
        const uint32_t at = to - kAddress;
        CHECK(at % sm80::kChunkBytes == 0 && at / 2 < tile.size());
        ++writes[at / sm80::kChunkBytes];
        std::copy(from, from + sm80::kChunkElements, tile.begin() + at / 2);
      });
    }
  }
  for (const int count : writes) CHECK(count == 1);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const uint16_t expected = column < kLeft ? Source::value(kFirstRow + row, column, 0)
                                               : Source::value(kFirstRow + row, column - kLeft, 1);
      CHECK(tile[Layout::offset(row, column / 8) / 2 + column % 8] == expected);
    }
  }
}

template <typename Config>
void test_whole_copies() {
  constexpr int kQK = Config::kHeadDimQK, kV = Config::kHeadDimV, kLeft = std::min(kQK, sm80::kLeftColumns);
  test_whole_copy<Config::kTileQ, kQK, Config::kThreads, kQK>(3 * kQK, 3 * kQK);
  test_whole_copy<Config::kTileKV, kQK, Config::kThreads, kLeft>(256 + kLeft, 576);
  test_whole_copy<Config::kTileKV, kQK, Config::kThreads, kLeft>(-2 * kQK, -640);
  test_whole_copy<Config::kTileKV, kV, Config::kThreads, kV>(kV, kV);
}

// ---- The table of tiles ---------------------------------------------------------------------------------------------

constexpr int32_t kBytes99 = 99 * 1024, kBytes163 = 163 * 1024, kBytes227 = 227 * 1024;

sm80::Variant choose(int32_t dim_qk, int32_t dim_v, int32_t shared_bytes) {
  return sm80::variant_at(sm80::choose_variant(dim_qk, dim_v, shared_bytes));
}

void test_table() {
  for (const int32_t bytes : {kBytes99, kBytes163, kBytes227}) {
    for (int32_t dim_qk = 8; dim_qk <= 256; dim_qk += 8) {
      for (int32_t dim_v = 8; dim_v <= 256; dim_v += 8) {
        const sm80::Variant v = choose(dim_qk, dim_v, bytes);
        CHECK(v.head_dim_qk >= dim_qk && v.head_dim_v >= dim_v && v.shared_bytes <= bytes);
        const plan::Config config = sm80::plan_config(dim_qk, dim_v, bytes);
        CHECK(config.tile_q == v.tile_q && config.short_tile_q == v.tile_q && config.tile_kv == v.tile_kv);
        CHECK(config.tile_q >= plan::kMinTileQ && config.tile_kv >= plan::kMinTileKV && config.short_keys == -1);
        // What the kernel's pieces count on: an item of them has one head, and results have room.
        CHECK(config.max_splits == plan::kMaxSplits && config.tile_q <= plan::kMostSplitRows);
        CHECK(config.min_split_keys >= plan::kMinSplitKeys && config.split_items <= plan::kMostSplitItems);
        CHECK(plan::heads_per_item(config, 128, 2 * config.min_split_keys) == 1);
      }
    }
  }
  CHECK(sm80::choose_variant(264, 128, kBytes227) == -1 && sm80::choose_variant(128, 264, kBytes227) == -1);

  // The narrowest that holds the dims; where an SM has room for two CTAs of large tiles, these.
  CHECK(choose(64, 64, kBytes227).head_dim_qk == 64 && choose(96, 64, kBytes227).head_dim_qk == 96);
  CHECK(choose(64, 128, kBytes227).head_dim_qk == 128 && choose(136, 64, kBytes227).head_dim_qk == 192);
  CHECK(choose(192, 128, kBytes227).tile_kv == 64 && choose(192, 128, kBytes163).tile_kv == 48);
  CHECK(choose(192, 128, kBytes99).tile_kv == 48 && choose(192, 136, kBytes99).head_dim_qk == 256);
  CHECK(choose(256, 256, kBytes227).tile_q == 128 && choose(256, 256, kBytes163).tile_q == 128);
  CHECK(choose(256, 256, kBytes99).tile_q == 64);

  // Pieces for the CTAs of an H200, on any device: 64 items become 256 pieces where an SM holds two.
  for (const int32_t bytes : {kBytes99, kBytes163, kBytes227}) {
    CHECK(plan::num_splits(sm80::plan_config(192, 128, bytes), 16, false, 512, 32768) == 4);
    CHECK(plan::num_splits(sm80::plan_config(192, 128, bytes), 16, true, 1, 4096) == 2);
    CHECK(plan::num_splits(sm80::plan_config(192, 128, bytes), 16, true, 1, 4095) == 1);
    CHECK(plan::num_splits(sm80::plan_config(192, 128, bytes), 133, false, 1, 65536) == 1);
  }
  CHECK(plan::num_splits(sm80::plan_config(256, 256, kBytes227), 16, false, 512, 32768) == 2);
}

// ---- Arguments ------------------------------------------------------------------------------------------------------

bool refused(const PrefillParams& p, const std::string& argument) { return names(sm80::supports(p), argument, "sm80"); }

void test_supports() {
  CHECK(sm80::supports(good()).empty());
  CHECK(sm80::supports(with([](auto& p) { p.dtype = DType::kFloat16; })).empty());
  CHECK(sm80::supports(with([](auto& p) { p.scale = -1.0f; })).empty());
  CHECK(sm80::supports(with([](auto& p) { p.q.data = g_memory + 1, p.q.row_stride += 1; })).empty());
  CHECK(sm80::supports(with([](auto& p) { p.dim_qk = 256, p.dim_k = 192, p.dim_v = 256; })).empty());
  CHECK(sm80::supports(with([](auto& p) { p.dim_qk = 96, p.dim_k = 64, p.dim_v = 64; })).empty());
  CHECK(refused(with([](auto& p) { p.dtype = DType::kFloat32; }), "q"));
  CHECK(refused(with([](auto& p) { p.dtype = DType::kFloat8E4M3; }), "q"));
  CHECK(refused(with([](auto& p) { p.dim_qk = 264; }), "head dims"));
  CHECK(refused(with([](auto& p) { p.dim_qk = 190; }), "head dims"));
  CHECK(refused(with([](auto& p) { p.dim_k = 100; }), "head dims"));
  CHECK(refused(with([](auto& p) { p.dim_v = 257; }), "head dims"));
}

// Strides that nothing steps over are free.
void test_memory() {
  const PrefillParams one = with([](auto& p) {
    p.total_q = p.total_k = p.num_heads = 1;
    for (auto* x : {&p.q, &p.k, &p.k_pe, &p.v}) x->row_stride = 777, x->head_stride = 333;
  });
  const PrefillParams p = sm80::normalised(one);
  for (const auto& x : {p.q, p.k, p.k_pe, p.v}) CHECK(sm80::is_aligned(x, 16));
  CHECK(!sm80::is_aligned(sm80::normalised(with([](auto& p) { p.v.row_stride += 4; })).v, 16));
  CHECK(!sm80::is_aligned(sm80::normalised(with([](auto& p) { p.v.head_stride += 1; })).v, 16));
  CHECK(!sm80::is_aligned(sm80::normalised(with([](auto& p) { p.q.data = g_memory + 4; })).q, 16));
  CHECK(sm80::is_aligned(sm80::normalised(with([](auto& p) { p.q.data = g_memory + 4; })).q, 8));

  // Keys in one tensor are two parts too, where they are wide.
  const PrefillParams joined = sm80::normalised(with([](auto& p) { p.dim_k = 192, p.k_pe = {}; }));
  CHECK(joined.dim_k == 128 && joined.k_pe.data == static_cast<const uint16_t*>(joined.k.data) + 128);
  CHECK(joined.k_pe.row_stride == joined.k.row_stride && joined.k_pe.head_stride == joined.k.head_stride);
  const PrefillParams narrow = sm80::normalised(with([](auto& p) { p.dim_qk = p.dim_k = 96, p.k_pe = {}; }));
  CHECK(narrow.dim_k == 96 && narrow.k_pe.data == narrow.k.data);
  const PrefillParams split = sm80::normalised(good());
  CHECK(split.dim_k == 128 && split.k_pe.data == good().k_pe.data && split.k_pe.head_stride == 0);
}

template <typename Change>
bool kv_is_whole(Change change) {
  const PrefillParams p = sm80::normalised(with(change));
  return sm80::kv_is_whole(p, choose(p.dim_qk, p.dim_v, kBytes227));
}

template <typename Change>
bool q_is_whole(Change change) {
  const PrefillParams p = sm80::normalised(with(change));
  return sm80::q_is_whole(p, choose(p.dim_qk, p.dim_v, kBytes227));
}

// What can be copied in whole tiles: columns as the tile has them, chunks, and strides of 32 bits.
void test_whole() {
  CHECK(kv_is_whole([](auto&) {}) && q_is_whole([](auto&) {}));
  CHECK(kv_is_whole([](auto& p) { p.dim_k = 192, p.k_pe = {}; }));
  CHECK(kv_is_whole([](auto& p) { p.dim_qk = p.dim_k = 128; }));
  CHECK(kv_is_whole([](auto& p) { p.dim_qk = p.dim_k = p.dim_v = 256; }));
  CHECK(kv_is_whole([](auto& p) { p.k.row_stride = -p.k.row_stride; }));
  CHECK(!kv_is_whole([](auto& p) { p.dim_k = 64; }));
  CHECK(!kv_is_whole([](auto& p) { p.dim_qk = 256, p.dim_k = 192, p.dim_v = 256; }));
  CHECK(!kv_is_whole([](auto& p) { p.dim_v = 120; }));
  CHECK(!kv_is_whole([](auto& p) { p.dim_qk = p.dim_k = 184; }) && !q_is_whole([](auto& p) { p.dim_qk = 184; }));
  CHECK(!kv_is_whole([](auto& p) { p.k.row_stride += 4; }) && !kv_is_whole([](auto& p) { p.k_pe.row_stride += 4; }));
  CHECK(!kv_is_whole([](auto& p) { p.v.data = g_memory + 4; }) &&
        !q_is_whole([](auto& p) { p.q.data = g_memory + 4; }));
  constexpr int64_t kFar = (int64_t)1 << 31;
  CHECK(!kv_is_whole([](auto& p) { p.k.row_stride = kFar; }) && !kv_is_whole([](auto& p) { p.v.row_stride = kFar; }));
  CHECK(!kv_is_whole([](auto& p) { p.k_pe.row_stride = -kFar - 8; }) &&
        !q_is_whole([](auto& p) { p.q.row_stride = kFar; }));
}

// ---- Devices --------------------------------------------------------------------------------------------------------

std::vector<std::string> kernels(const char* backends, int capability, const char* forced = "") {
  const cuda::Kernels found = cuda::kernels_for(backends, "80,86,89,90", forced, capability / 10, capability % 10);
  CHECK(found.kernels.empty() == !found.reason.empty());
  std::vector<std::string> names;
  for (const cuda::Kernel kernel : found.kernels) names.push_back(cuda::name_of(kernel));
  return names;
}

std::string reason(const char* backends, int capability, const char* forced = "") {
  return cuda::kernels_for(backends, "80,86", forced, capability / 10, capability % 10).reason;
}

void test_devices() {
  using Names = std::vector<std::string>;
  constexpr const char* kBoth = "cpu,sm90,sm80";
  CHECK((kernels(kBoth, 90) == Names{"sm90", "sm80"}));
  CHECK((kernels("cpu,sm80,sm90", 90) == Names{"sm90", "sm80"}));
  for (const int capability : {80, 86, 87, 89, 100, 103, 120, 121})
    CHECK((kernels(kBoth, capability) == Names{"sm80"}));
  CHECK(kernels(kBoth, 75).empty() && kernels("cpu", 90).empty() && kernels("cpu,sm90", 80).empty());
  CHECK((kernels("cpu,sm90", 90) == Names{"sm90"} && kernels("cpu,sm80", 90) == Names{"sm80"}));

  CHECK((kernels(kBoth, 90, "sm80") == Names{"sm80"} && kernels(kBoth, 90, "sm90") == Names{"sm90"}));
  CHECK(kernels(kBoth, 80, "sm90").empty());
  CHECK(reason(kBoth, 90, "sm70") == "MLA_PREFILL_FORCE: expected sm90 or sm80, got sm70");
  CHECK(reason("cpu,sm80", 90, "sm90") == "MLA_PREFILL_FORCE: expected sm80, got sm90");
  CHECK(reason("cpu", 90, "sm90") == "MLA_PREFILL_FORCE: expected nothing, got sm90");
  CHECK(reason(kBoth, 75) ==
        "device: expected compute capability 9.0 (sm90 kernel) or 8.0, 8.6 and above (sm80 kernel), got 7.5");
  CHECK(reason(kBoth, 80, "sm90") == "device: expected compute capability 9.0 (sm90 kernel), got 8.0");

  CHECK(cuda::has_code("80,86", 8, 0) && cuda::has_code("86", 8, 9) && cuda::has_code("86", 9, 0));
  CHECK(!cuda::has_code("86", 8, 0) && !cuda::has_code("90", 8, 9) && !cuda::has_code("", 8, 0));
}

}  // namespace

int main() {
  test_layout<64>();
  test_layout<96>();
  test_layout<128>();
  test_layout<192>();
  test_layout<256>();
  test_products<64, 64>();
  test_products<96, 64>();
  test_products<128, 128>();
  test_products<192, 128>();
  test_products<256, 256>();
  test_table();
  sm80::for_each_config([](auto config) { test_whole_copies<decltype(config)>(); });
  test_supports();
  test_memory();
  test_whole();
  test_devices();
  return report("sm80");
}
