// The test programs' one check: says what failed and where, and makes main return non-zero.
#pragma once

#include <cstdio>

inline int g_failures = 0;

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++g_failures;                                                       \
    }                                                                     \
  } while (0)

inline int report(const char* name) {
  std::printf("%s: %s\n", name, g_failures ? "FAILED" : "passed");
  return g_failures ? 1 : 0;
}
