// Tile sizes of the CPU kernel. With head dims (128, 64, 128) an item's scratch is about 460 KB and stays in a 1-2 MB
// L2; what one strip of query rows works on (24 KB of Q, 12 KB of scores, 16 KB of O) about fills a 48 KB L1.
#pragma once

#include <cstdint>

namespace mla_prefill::cpu {

constexpr int32_t kTileQ = 256;    // query rows of a work item: they share one widened tile of K and V
constexpr int32_t kTileKeys = 96;  // keys of a tile, a multiple of every key group in kernel.h
constexpr int32_t kChunk = 16;     // K and V tiles are stored in chunks of 16 dims: one cache line of floats

}  // namespace mla_prefill::cpu
