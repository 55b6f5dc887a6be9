"""Matrix instructions: D = A B + C, of which every lane holds a part."""

from __future__ import annotations

import re

import numpy as np

from gfx9.operands import Kind, Operand
from gfx9.vector import from_f16
from gfx9.wave import LANE, Action, Wave, as_float, as_words

NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_?(bf16|f16)(_1k)?$")


def decode(name: str, operands: list[Operand], modifiers: dict[str, str], arch: str) -> Action | None:
    """Layouts of AMD's matrix instruction calculator.

    For an N x N result of depth K, lane l holds row l % N of A and column l % N of B, elements K / g * (l / N) onwards
    of the depth, with g = 64 / N. Of D it holds column l % N; register r is row 8 (r / 4) + 4 (l / 32) + r % 4 where N
    is 32, row 4 (l / 16) + r where N is 16.
    """
    match = NAME.match(name)
    if match is None or modifiers:
        return None
    size, depth, dtype = int(match[1][:2]), int(match[2]), match[3]
    groups = 64 // size
    per_lane = depth // groups
    results = size * size // 64
    register, lane = np.arange(results)[:, None], LANE[None, :]
    row = 8 * (register // 4) + 4 * (lane // 32) + register % 4 if size == 32 else 4 * (lane // 16) + register
    column = lane % size + 0 * register
    to, a, b, c = operands
    smallest_normal = 2.0**-126 if dtype == "bf16" else 2.0**-14

    def matrix(w: Wave, first: int) -> np.ndarray:
        words = w.vector[first : first + per_lane // 2]
        halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)  # [register, lane, 2]
        halves = halves.transpose(1, 0, 2).reshape(64, per_lane)
        values = as_float(halves << np.uint32(16)) if dtype == "bf16" else from_f16(halves)
        if arch == "gfx90a":  # takes subnormal inputs as 0
            values = np.where(np.abs(values) < smallest_normal, np.float32(0), values)
        return values.reshape(groups, size, per_lane).transpose(1, 0, 2).reshape(size, depth).astype(np.float64)

    def execute(w: Wave) -> None:  # for all lanes, whatever the execution mask says
        addend = as_float(w.vector[c.index : c.index + results]) if c.kind is Kind.VECTOR else as_float(c.lanes)
        product = matrix(w, a.index) @ matrix(w, b.index).T
        w.vector[to.index : to.index + results] = as_words((product[row, column] + addend).astype(np.float32))
        w.matrix_steps += 1

    return execute
