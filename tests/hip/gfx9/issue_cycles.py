"""Modelled issue cycles of executed instructions on one SIMD, per class. Not a time: nothing waits or overlaps."""

from __future__ import annotations

import re
from collections import Counter

# Dense bf16/fp16 operations per cycle of a SIMD, from AMD's matrix instruction calculator.
MATRIX_RATE = {"gfx90a": 256, "gfx942": 512, "gfx950": 1024}
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)")
QUARTER_RATE = re.compile(r"v_(mad_u64|mad_i64|mul_lo_u32|mul_hi_u32|mul_hi_i32)")
MATRIX = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)")


def cost(name: str, arch: str) -> tuple[str, float] | None:
    """Class and cycles of an instruction of 64 lanes; None for those that don't issue to a vector unit."""
    if match := MATRIX.match(name):
        rows, columns, depth = map(int, match.groups())
        # gfx950 reaches its rate with the deeper instructions only.
        full_rate = arch != "gfx950" or rows * depth >= 512
        return "mfma", 2 * rows * columns * depth / (MATRIX_RATE[arch] if full_rate else MATRIX_RATE[arch] / 2)
    if TRANSCENDENTAL.match(name):
        return "transcendental", 16
    if QUARTER_RATE.match(name):
        return "valu", 16
    return ("valu", 4) if name.startswith("v_") else None


def issue_cycles(executed: Counter[str], arch: str) -> dict[str, float]:
    cycles = {"mfma": 0.0, "valu": 0.0, "transcendental": 0.0}
    for name, count in executed.items():
        if classified := cost(name, arch):
            kind, each = classified
            cycles[kind] += each * count
    return cycles
