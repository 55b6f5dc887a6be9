#if defined(__x86_64__)

// Shared headers come before the target pragma: what they define inline must run on any machine.
#include "cpu/isa.h"

#define MLA_CPU_ISA avx512
#define MLA_CPU_LANES 16

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#include "cpu/kernel.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#include "cpu/kernel.h"
#endif

#endif
