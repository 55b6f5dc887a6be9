"""Modelled issue cycles of the AMD kernel for 128 query rows on 1152 keys, one head, per wave.

    python tests/hip/budget.py

Compiles the kernel, runs it in the emulator and counts what its waves executed. The budget is what AITER's hand-written
kernel for gfx942 spends on the same tile in the same model; the last column says how far ahead of their use keys and
values are loaded, in MFMA instructions.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import torch
from gfx9.issue_cycles import issue_cycles
from kernels import ARCHITECTURES, code_object, plan_tensor, ragged_prefill

AITER_CYCLES = {"mfma": 46_080, "valu": 25_764, "transcendental": 9_888}  # gfx942
TOLERANCE = 1.05
ROWS, KEYS, WAVES = 128, 1152, 4
KEY_TILES = KEYS // 32
LOADS_PER_TILE = 7  # of a thread: 3 of K, 4 of V
DTYPES = {"bfloat16": "prefill_bf16", "float16": "prefill_fp16"}


@dataclass(frozen=True)
class Report:
    cycles: dict[str, float]  # by class, mean of the four waves
    load_distances: list[int]  # MFMA instructions between each buffer load of a wave and the wait for it

    @property
    def typical_distance(self) -> int:
        return sorted(self.load_distances)[len(self.load_distances) // 2]


@functools.cache
def measure(arch: str, dtype: str, causal: bool) -> Report:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    emulator = ragged_prefill(
        code_object(DTYPES[dtype], arch),
        q=random(ROWS, 1, 192),
        k=random(KEYS, 1, 128),
        v=random(KEYS, 1, 128),
        k_pe=random(KEYS, 64),
        cu_seqlens_q=torch.tensor([0, ROWS], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, KEYS], dtype=torch.int32),
        scale=192**-0.5,
        causal=causal,
        plan=plan_tensor([(0, 0, ROWS, 0, KEYS, 0, 1, -1)]),
        out=random(ROWS, 1, 128),
        lse=torch.zeros(1, ROWS),
        num_blocks=1,
    )
    cycles = {kind: total / WAVES for kind, total in issue_cycles(emulator.executed, arch).items()}
    return Report(cycles, [distance for name, distance in emulator.waited if name.startswith("buffer_load")])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

    def line(name: str, *columns: str) -> None:
        print(f"{name:24}" + "".join(f"{column:>18}" for column in columns))

    line("", *AITER_CYCLES, "loads ahead")
    line("budget, gfx942", *(f"{cycles:,}" for cycles in AITER_CYCLES.values()), "")
    for arch in ARCHITECTURES:
        for dtype in DTYPES:
            for causal in (True, False):
                report = measure(arch, dtype, causal)
                columns = [
                    f"{cycles:,.0f}" + (f" ({cycles / AITER_CYCLES[kind]:.0%})" if arch == "gfx942" else "")
                    for kind, cycles in report.cycles.items()
                ]
                mask = "causal" if causal else "full"
                line(f"{arch} {dtype} {mask}", *columns, str(report.typical_distance))


if __name__ == "__main__":
    main()
