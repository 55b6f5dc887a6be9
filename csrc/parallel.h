// How a CPU kernel gets its threads: from torch's pool in the op library, from std::thread in the C++ tests.
#pragma once

#include <cstdint>
#include <functional>

namespace mla_prefill {

struct Parallel {
  int num_threads = 1;
  // Calls body(begin, end) over disjoint ranges that cover [0, n), in parallel where it can.
  std::function<void(int64_t n, const std::function<void(int64_t begin, int64_t end)>& body)> run;
};

}  // namespace mla_prefill
