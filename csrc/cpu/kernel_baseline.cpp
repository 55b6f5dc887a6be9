// For x86-64 without AVX2, and for any other machine: vectors of four floats.
#include "cpu/isa.h"

#define MLA_CPU_ISA baseline
#define MLA_CPU_LANES 4

#include "cpu/kernel.h"
