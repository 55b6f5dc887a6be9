// The work plan of ragged_prefill: one int32 buffer, a header, room for CTAs to meet, and then the items in the order
// in which they start.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/rules.h"

namespace mla_prefill::plan {

struct Header {
  int32_t version;
  int32_t num_items;
  int32_t capacity;  // items that the buffer holds
  int32_t batch;
  int32_t num_heads;
  int32_t causal;
  int32_t tile_q;
  int32_t tile_kv;
  int32_t first_short;                  // items of short sequences are [first_short, num_items)
  int32_t split_end[kNumSplitClasses];  // see piece_of_ticket
  int32_t ticket[2];    // of a kernel's launch over the long and the short items: how many it has taken,
  int32_t finished[2];  // and how many of its CTAs are done; 0 between launches
  int32_t timeline;     // where the buffer has room for a timeline, in ints, a multiple of 4; 0: nowhere
  int32_t reserved[6];
};

constexpr int32_t kVersion = 2;
constexpr int64_t kHeaderInts = sizeof(Header) / sizeof(int32_t);
constexpr int64_t kItemInts = sizeof(WorkItem) / sizeof(int32_t);

// Behind the header: int32 [kSplitSlots][kRowGroups], where the warps of CTAs that share an item meet, each with those
// of the same query rows; 0 between launches. A slot is for a piece whose result waits for the others'.
constexpr int32_t kSplitSlots = 256;  // about what a GPU has in flight
constexpr int32_t kRowGroups = 8;
constexpr int32_t kMostSplitRows = 128;  // of a split item
static_assert(kSplitSlots % kMaxSplits == 0, "the pieces of an item have slots in a row");

constexpr int64_t kItemsBegin = kHeaderInts + kSplitSlots * kRowGroups;
static_assert(kHeaderInts == 24 && kItemsBegin == 2072 && kItemInts == 8, "the layout is part of the ops' contract");

// When a worker began with a ticket. A timeline is one stamp for each ticket of the long items (see piece_of_ticket)
// and one for each worker's end, then the same for the short items, where there are any. Planners leave no room for
// one: who wants to see it puts the room behind the items. Only the sm90 kernel writes it.
struct alignas(16) Stamp {
  int32_t worker;
  int32_t sm;
  int64_t time;  // in nanoseconds, of a clock that all SMs share
};
constexpr int32_t kStampInts = sizeof(Stamp) / sizeof(int32_t);
static_assert(kStampInts == 4, "the layout is part of the ops' contract");

struct Problem {
  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1]
  const int32_t* cu_seqlens_k = nullptr;  // [batch + 1]
  int32_t batch = 0;
  int32_t num_heads = 0;
  bool causal = false;
  int64_t bytes_per_key = 0;  // of K and V, per head
};

// The work list, longest first. Linear in the number of sequences plus items.
std::vector<WorkItem> make_items(const Config& config, const Problem& problem);

// Writes header and items into a buffer of kItemsBegin + kItemInts * capacity ints.
// Returns an empty string, or why it can't.
std::string write(const Config& config, const Problem& problem, int32_t* buffer, int64_t capacity);

// Empty if the buffer of `size` ints is a plan for exactly this problem, otherwise what differs.
std::string check(const Config& config, const Problem& problem, const int32_t* buffer, int64_t size);

inline const WorkItem* items(const int32_t* buffer) { return reinterpret_cast<const WorkItem*>(buffer + kItemsBegin); }

}  // namespace mla_prefill::plan
