#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "plan/plan.h"
#include "sm90/config.h"

namespace plan = mla_prefill::plan;

namespace {

std::vector<int32_t> cumulative(const std::vector<int32_t>& lengths, int32_t first = 0) {
  std::vector<int32_t> cu = {first};
  for (const int32_t length : lengths) cu.push_back(cu.back() + length);
  return cu;
}

struct Batch {
  std::vector<int32_t> cu_q, cu_k;
  plan::Problem problem;

  Batch(const std::vector<int32_t>& len_q, const std::vector<int32_t>& len_k, int32_t num_heads, bool causal)
      : cu_q(cumulative(len_q, 3)), cu_k(cumulative(len_k, 5)) {
    problem = {cu_q.data(), cu_k.data(), (int32_t)len_q.size(), num_heads, causal, 640};
  }
  Batch(const Batch&) = delete;
};

void test_rules() {
  CHECK(plan::visible_keys(true, 2, 5, 1) == 4);  // bottom-right: row 0 of 2 sees 4 of 5 keys
  CHECK(plan::visible_keys(true, 2, 5, 2) == 5);
  CHECK(plan::visible_keys(true, 5, 2, 3) == 0);  // len_q > len_k: the first rows see none
  CHECK(plan::visible_keys(false, 5, 2, 1) == 2);
  int32_t last = -1;
  for (int64_t tiles = 0; tiles < 100000; ++tiles) {
    const int32_t rank = plan::length_rank(tiles);
    CHECK(rank == last || rank == last + 1);
    last = rank;
  }
  plan::Config finest;
  finest.tile_kv = plan::kMinTileKV;
  CHECK(plan::sequence_rank(finest, 1, false, 1, INT32_MAX) < plan::kNumLengthRanks);
}

// Every (sequence, row, head) exactly once, with exactly the keys that its tile sees; longest first.
void test_covers(const Batch& batch, const plan::Config& config) {
  const plan::Problem& p = batch.problem;
  const std::vector<plan::WorkItem> items = plan::make_items(config, p);
  std::vector<int> seen((size_t)(batch.cu_q.back() - batch.cu_q[0]) * p.num_heads);
  int32_t last_rank = plan::kNumRanks;
  for (const plan::WorkItem& item : items) {
    const int32_t len_q = batch.cu_q[item.seq + 1] - batch.cu_q[item.seq];
    const int32_t len_k = batch.cu_k[item.seq + 1] - batch.cu_k[item.seq];
    CHECK(item.q_rows > 0 && item.q_begin % config.tile_q == 0 && item.q_begin + item.q_rows <= len_q);
    CHECK(item.head_count > 0 && item.head_begin + item.head_count <= p.num_heads);
    CHECK(item.kv_begin == 0 && item.kv_end == plan::visible_keys(p.causal, len_q, len_k, item.q_begin + item.q_rows));
    CHECK(item.num_splits == plan::num_splits(config, p.num_heads, p.causal, len_q, len_k));
    CHECK(item.num_splits == 1 || item.head_count == 1);
    const int32_t rank = plan::sequence_rank(config, p.num_heads, p.causal, len_q, len_k);
    CHECK(rank <= last_rank);
    last_rank = rank;
    for (int32_t row = item.q_begin; row < item.q_begin + item.q_rows; ++row) {
      for (int32_t head = item.head_begin; head < item.head_begin + item.head_count; ++head) {
        ++seen[(size_t)(batch.cu_q[item.seq] - batch.cu_q[0] + row) * p.num_heads + head];
      }
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }));
  CHECK((int64_t)items.size() <= plan::max_items(batch.cu_q.back() - batch.cu_q[0], p.batch, p.num_heads));
}

void test_random() {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int batch = random() % 9;
    std::vector<int32_t> len_q, len_k;
    for (int b = 0; b < batch; ++b) {
      len_q.push_back(random() % 4 == 0 ? 0 : random() % 600);
      len_k.push_back(random() % 4 == 0 ? 0 : random() % 3000);
    }
    plan::Config config;
    config.tile_q = 64 << random() % 3;
    config.group_bytes = 1 << (14 + random() % 12);
    config.max_splits = 1 << random() % 5;
    config.split_items = random() % 200;
    config.min_split_keys = 2 * config.tile_kv;
    test_covers(Batch(len_q, len_k, 1 + random() % 20, random() % 2), config);
  }
}

// Every piece of every item has one ticket, those of an item in a row and aligned to their number.
void test_tickets() {
  plan::Config config;
  config.max_splits = plan::kMaxSplits;
  config.split_items = 132;
  config.min_split_keys = 2048;
  CHECK(plan::num_splits(config, 16, false, 512, 32768) == 2);  // 64 items
  CHECK(plan::num_splits(config, 16, false, 64, 32768) == 8);
  CHECK(plan::num_splits(config, 16, false, 64, 10000) == 4);  // pieces of 2048 keys at least
  CHECK(plan::num_splits(config, 16, true, 4096, 4096) == 1);  // the first rows see few
  CHECK(plan::num_splits(config, 1, false, 1, INT32_MAX) == 16);
  CHECK(plan::sequence_rank(config, 1, false, 1, INT32_MAX) < plan::kNumRanks);
  CHECK(plan::may_split(132, 4096) && !plan::may_split(133, 4096) && !plan::may_split(1, 4095));
  for (const auto& [dim_qk, dim_v] : {std::pair(192, 128), std::pair(128, 128), std::pair(256, 256)}) {
    const plan::Config hopper = mla_prefill::sm90::plan_config(dim_qk, dim_v);
    CHECK(hopper.tile_q <= plan::kMostSplitRows && hopper.split_items <= plan::kMostSplitItems);
    CHECK(hopper.min_split_keys >= plan::kMinSplitKeys && hopper.max_splits <= plan::kMaxSplits);
  }

  const Batch batch({64, 300, 1, 512, 4000, 1}, {40000, 5000, 30, 9000, 4000, 70000}, 8, false);
  std::vector<int32_t> buffer(plan::kItemsBegin + plan::kItemInts * plan::max_items(4878, 6, 8));
  const int64_t capacity = ((int64_t)buffer.size() - plan::kItemsBegin) / plan::kItemInts;
  CHECK(plan::write(config, batch.problem, buffer.data(), capacity).empty());
  const plan::Header& header = *reinterpret_cast<const plan::Header*>(buffer.data());
  int32_t ticket = 0;
  for (int32_t i = 0; i < header.num_items; ++i) {
    const int32_t splits = plan::items(buffer.data())[i].num_splits;
    CHECK(ticket % splits == 0);
    for (int32_t index = 0; index < splits; ++index, ++ticket) {
      const plan::Piece piece = plan::piece_of_ticket(header.split_end, ticket);
      CHECK(piece.item == i && piece.index == index && piece.num_splits == splits);
    }
    if (i + 1 == header.split_end[3]) CHECK(ticket == plan::num_pieces(header.split_end));
  }
  CHECK(plan::items(buffer.data())[0].num_splits == 16 && header.split_end[0] == 16);
}

void test_write_and_check() {
  const plan::Config config;
  const Batch batch({100, 0, 300}, {500, 10, 300}, 4, true);
  const int64_t capacity = plan::max_items(400, 3, 4);
  std::vector<int32_t> buffer(plan::kItemsBegin + plan::kItemInts * capacity);
  const int64_t size = (int64_t)buffer.size();
  CHECK(plan::write(config, batch.problem, buffer.data(), capacity).empty());
  CHECK(plan::check(config, batch.problem, buffer.data(), size).empty());

  const auto refused = [&](const plan::Problem& problem, const char* what) {
    return plan::check(config, problem, buffer.data(), size).find(what) != std::string::npos;
  };
  CHECK(refused(Batch({100, 0, 301}, {500, 10, 300}, 4, true).problem, "made for these cu_seqlens"));
  CHECK(refused(Batch({100, 0, 300}, {501, 10, 300}, 4, true).problem, "made for these cu_seqlens"));
  CHECK(refused(Batch({100, 5, 300}, {500, 10, 300}, 4, true).problem, "rows x heads"));
  CHECK(refused(Batch({100, 0, 300}, {500, 10, 300}, 5, true).problem, "num_heads"));
  CHECK(refused(Batch({100, 0, 300}, {500, 10, 300}, 4, false).problem, "causal"));
  CHECK(refused(Batch({100, 300}, {500, 300}, 4, true).problem, "batch"));
  CHECK(!plan::check(config, batch.problem, buffer.data(), 10).empty());
  CHECK(plan::write(config, batch.problem, buffer.data(), 2).find("max_tokens_q") == 0);
}

void test_many_sequences() {
  const auto seconds = [](int count) {
    const Batch batch(std::vector<int32_t>(count, 7), std::vector<int32_t>(count, 9), 16, true);
    const auto begin = std::chrono::steady_clock::now();
    CHECK((int)plan::make_items(plan::Config(), batch.problem).size() >= count);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  CHECK(seconds(100000) < 1.0);
}

}  // namespace

int main() {
  test_rules();
  test_random();
  test_tickets();
  test_write_and_check();
  test_many_sequences();
  return report("plan");
}
