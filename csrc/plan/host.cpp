#include "plan/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace mla_prefill::plan {
namespace {

int32_t length(const int32_t* cu_seqlens, int32_t seq) { return cu_seqlens[seq + 1] - cu_seqlens[seq]; }

// Sequences that have query rows, longest first: a stable counting sort by rank.
std::vector<int32_t> order_sequences(const Config& config, const Problem& problem) {
  const auto rank_of = [&](int32_t seq) {
    return sequence_rank(config, problem.num_heads, problem.causal, length(problem.cu_seqlens_q, seq),
                         length(problem.cu_seqlens_k, seq));
  };
  int32_t begin[kNumRanks] = {};  // first, sequences per rank; then, where the rank's next sequence goes
  int32_t num_sequences = 0;
  for (int32_t seq = 0; seq < problem.batch; ++seq) {
    if (length(problem.cu_seqlens_q, seq) == 0) continue;
    ++begin[rank_of(seq)];
    ++num_sequences;
  }
  for (int32_t rank = kNumRanks - 1, offset = 0; rank >= 0; --rank) {
    const int32_t count = begin[rank];
    begin[rank] = offset;
    offset += count;
  }
  std::vector<int32_t> order(num_sequences);
  for (int32_t seq = 0; seq < problem.batch; ++seq) {
    if (length(problem.cu_seqlens_q, seq) > 0) order[begin[rank_of(seq)]++] = seq;
  }
  return order;
}

}  // namespace

std::vector<WorkItem> make_items(const Config& config, const Problem& problem) {
  std::vector<WorkItem> items;
  for (const int32_t seq : order_sequences(config, problem)) {
    const SequenceWork work = sequence_work(config, problem.num_heads, problem.causal, problem.bytes_per_key,
                                            length(problem.cu_seqlens_q, seq), length(problem.cu_seqlens_k, seq));
    for (int32_t i = 0; i < work.num_items; ++i) items.push_back(item_of_sequence(work, problem.causal, seq, i));
  }
  return items;
}

std::string write(const Config& config, const Problem& problem, int32_t* buffer, int64_t capacity) {
  const std::vector<WorkItem> items = make_items(config, problem);
  if ((int64_t)items.size() > capacity) {
    return "max_tokens_q: expected at least the " +
           std::to_string(problem.cu_seqlens_q[problem.batch] - problem.cu_seqlens_q[0]) +
           " query rows of cu_seqlens_q, got a plan of " + std::to_string(capacity) + " items for " +
           std::to_string(items.size());
  }
  if (capacity > std::numeric_limits<int32_t>::max()) {
    return "max_tokens_q: expected a plan of at most 2^31 - 1 items, got " + std::to_string(capacity);
  }
  Header header = {};
  header.version = kVersion;
  header.num_items = (int32_t)items.size();
  header.capacity = (int32_t)capacity;
  header.batch = problem.batch;
  header.num_heads = problem.num_heads;
  header.causal = problem.causal;
  header.tile_q = config.tile_q;
  header.tile_kv = config.tile_kv;
  header.first_short = (int32_t)(std::find_if(items.begin(), items.end(),
                                              [&](const WorkItem& item) {
                                                return is_short(config, length(problem.cu_seqlens_k, item.seq));
                                              }) -
                                 items.begin());
  for (int32_t i = 0; i < kNumSplitClasses; ++i) {
    header.split_end[i] =
        (int32_t)(std::find_if(items.begin(), items.end(),
                               [&](const WorkItem& item) { return item.num_splits < 1 << (kNumSplitClasses - i); }) -
                  items.begin());
  }
  std::memcpy(buffer, &header, sizeof header);
  // The unused rest is zeroed, so that equal lengths give equal plans.
  std::fill(buffer + kHeaderInts, buffer + kItemsBegin, 0);
  int32_t* end =
      std::copy_n(reinterpret_cast<const int32_t*>(items.data()), items.size() * kItemInts, buffer + kItemsBegin);
  std::fill(end, buffer + kItemsBegin + kItemInts * capacity, 0);
  return "";
}

std::string check(const Config& config, const Problem& problem, const int32_t* buffer, int64_t size) {
  const auto differs = [](const char* what, int64_t expected, int64_t got) {
    return std::string("plan: expected ") + what + " " + std::to_string(expected) + ", got " + std::to_string(got);
  };
  if (size < kItemsBegin) return differs("at least this many entries:", kItemsBegin, size);
  Header header;
  std::memcpy(&header, buffer, sizeof header);
  if (header.version != kVersion) return differs("version", kVersion, header.version);
  if (header.batch != problem.batch) return differs("a plan for a batch of", problem.batch, header.batch);
  if (header.num_heads != problem.num_heads) return differs("num_heads", problem.num_heads, header.num_heads);
  if (header.causal != problem.causal) return differs("causal", problem.causal, header.causal);
  if (header.tile_q != config.tile_q) return differs("query tiles of", config.tile_q, header.tile_q);
  const int64_t room = (size - kItemsBegin) / kItemInts;
  if (header.num_items < 0 || header.num_items > room)
    return differs("at most this many items:", room, header.num_items);

  int64_t rows_planned = 0;
  for (int32_t i = 0; i < header.num_items; ++i) {
    const WorkItem& item = items(buffer)[i];
    const bool in_range = item.seq >= 0 && item.seq < problem.batch && item.q_begin >= 0 && item.q_rows > 0 &&
                          item.head_begin >= 0 && item.head_count > 0 &&
                          (int64_t)item.head_begin + item.head_count <= problem.num_heads;
    const int32_t len_q = in_range ? length(problem.cu_seqlens_q, item.seq) : 0;
    const int32_t len_k = in_range ? length(problem.cu_seqlens_k, item.seq) : 0;
    const int64_t q_end = (int64_t)item.q_begin + item.q_rows;
    if (!in_range || q_end > len_q || item.kv_begin != 0 ||
        item.kv_end != visible_keys(problem.causal, len_q, len_k, (int32_t)q_end)) {
      return "plan: expected a plan made for these cu_seqlens, got one whose item " + std::to_string(i) +
             " (sequence " + std::to_string(item.seq) + ", rows " + std::to_string(item.q_begin) + " to " +
             std::to_string(q_end) + ", keys up to " + std::to_string(item.kv_end) + ") does not fit them";
    }
    rows_planned += (int64_t)item.q_rows * item.head_count;
  }
  const int64_t rows = (int64_t)(problem.cu_seqlens_q[problem.batch] - problem.cu_seqlens_q[0]) * problem.num_heads;
  if (rows_planned != rows) return differs("a plan that covers this many rows x heads:", rows, rows_planned);
  return "";
}

}  // namespace mla_prefill::plan
