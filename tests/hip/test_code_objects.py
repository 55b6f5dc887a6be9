"""What the compiler made of the kernels: registers, shared memory, matrix instructions, and their order."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from budget import AITER_CYCLES, DTYPES, KEY_TILES, LOADS_PER_TILE, TOLERANCE, WAVES, measure
from gfx9 import CodeObject, Emulator
from kernels import ARCHITECTURES, OBJDUMP, READELF, SOURCES, compile_kernels

pytestmark = pytest.mark.usefixtures("toolchain")

SHARED_BYTES = {"gfx90a": 64 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
WAVES_PER_SIMD = 2
MFMA = {
    ("prefill_bf16", "gfx90a"): {"v_mfma_f32_32x32x8bf16_1k": 40},
    ("prefill_bf16", "gfx942"): {"v_mfma_f32_32x32x8_bf16": 40},
    ("prefill_bf16", "gfx950"): {"v_mfma_f32_32x32x16_bf16": 20},
    ("prefill_fp16", "gfx90a"): {"v_mfma_f32_32x32x8f16": 40},
    ("prefill_fp16", "gfx942"): {"v_mfma_f32_32x32x8_f16": 40},
    ("prefill_fp16", "gfx950"): {"v_mfma_f32_32x32x16_f16": 20},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", SOURCES)
def test_code_object(kernel: str, arch: str, tmp_path: Path) -> None:
    """No scratch, no spilled registers, within the limits for the waves that should fit; every opcode is modelled."""
    path = compile_kernels(kernel, arch, tmp_path / "kernels.co")
    notes = subprocess.run([READELF, "-n", path], capture_output=True, text=True, check=True).stdout

    def values(name: str) -> list[int]:
        return [int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", notes)]

    kernels = len(values("vgpr_count"))
    assert kernels >= 1
    assert values("vgpr_spill_count") == [0] * kernels
    assert values("private_segment_fixed_size") == [0] * kernels
    assert max(values("group_segment_fixed_size")) <= SHARED_BYTES[arch]
    assert max(values("vgpr_count")) <= 512

    code = CodeObject(path, OBJDUMP)
    instructions = Counter(instruction.name for instruction in code.instructions.values())
    assert {name: count for name, count in instructions.items() if "mfma" in name} == MFMA.get((kernel, arch), {})
    if kernel.startswith("prefill"):
        assert values("sgpr_spill_count") == [0]
        assert max(values("vgpr_count")) <= 512 // WAVES_PER_SIMD
        assert max(values("group_segment_fixed_size")) <= SHARED_BYTES[arch] // WAVES_PER_SIMD
    Emulator(code).decode_all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_issue_cycles_are_within_the_budget(dtype: str, causal: bool) -> None:
    for kind, cycles in measure("gfx942", dtype, causal).cycles.items():
        assert 0 < cycles <= AITER_CYCLES[kind] * TOLERANCE, f"{kind}: {cycles:.0f} cycles"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_keys_and_values_are_loaded_ahead_of_use(arch: str) -> None:
    """Between the loads of a tile and the wait for them lies the whole computation of the one before."""
    (steps_of_a_tile,) = MFMA["prefill_bf16", arch].values()
    distances = measure(arch, "bfloat16", causal=False).load_distances
    assert distances.count(steps_of_a_tile) == WAVES * (KEY_TILES - 1) * LOADS_PER_TILE
