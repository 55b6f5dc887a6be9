"""Modelled issue cycles of the AMD kernel for 128 query rows on 1152 keys, one head, causal, bottom-right.

    python tests/hip/budget.py

Compiles the kernel, runs it in the emulator and counts what each wave executed. The budget is what AITER's hand-written
gfx942 kernel for (128, 64, 128) spends on the same work in the same model.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import torch
from gfx9.issue_cycles import issue_cycles
from kernels import ARCHITECTURES, code_object, plan_tensor, ragged_prefill

AITER_CYCLES = {"mfma": 46_080, "valu": 25_764, "transcendental": 9_888}
TOLERANCE = 1.05
ROWS, KEYS, TILE_KV, WAVES = 128, 1152, 32, 4
DTYPES = {"bfloat16": "prefill_bf16", "float16": "prefill_fp16"}


@dataclass(frozen=True)
class Report:
    cycles: dict[str, float]  # by class, mean of the four waves
    load_distances: list[int]  # of each buffer load: MFMA instructions until the wait for it
    tiles: int = KEYS // TILE_KV
    loads_per_tile: int = 7  # 3 of K, 4 of V
    full_waves: int = 1  # the last wave alone computes every tile; the diagonal ends earlier for the others


@functools.cache
def measure(arch: str, dtype: str) -> Report:
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
        causal=True,
        plan=plan_tensor([(0, 0, ROWS, 0, KEYS, 0, 1, -1)]),
        out=random(ROWS, 1, 128),
        lse=torch.zeros(1, ROWS),
        num_blocks=1,
    )
    cycles = {kind: total / WAVES for kind, total in issue_cycles(emulator.executed, arch).items()}
    return Report(cycles, [distance for name, distance in emulator.waited if name.startswith("buffer_load")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"{'':22}" + "".join(f"{kind:>22}" for kind in AITER_CYCLES))
    print(f"{'budget (gfx942)':22}" + "".join(f"{cycles:>14,.0f}{'':8}" for cycles in AITER_CYCLES.values()))
    for arch in ARCHITECTURES:
        for dtype in DTYPES:
            report = measure(arch, dtype)
            columns = (
                f"{cycles:>14,.0f} {cycles / AITER_CYCLES[kind]:>6.0%} " for kind, cycles in report.cycles.items()
            )
            print(f"{f'{arch} {dtype}':22}" + "".join(columns))


if __name__ == "__main__":
    main()
