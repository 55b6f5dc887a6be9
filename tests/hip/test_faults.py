"""Faults planted in the kernel's source: each must be caught, by a check of the emulator or by the oracle."""

from __future__ import annotations

import copy
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from cases import MLA, Case
from gfx9 import CodeObject, EmulatorError
from helpers import NAN, assert_matches_oracle, make_inputs
from kernels import OBJDUMP, ROOT, code_object, compile_kernels, plan_tensor, ragged_prefill

from mla_prefill._C import plan_items

pytestmark = pytest.mark.usefixtures("toolchain")

PREFILL = {torch.bfloat16: "prefill_bf16", torch.float16: "prefill_fp16"}


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    before: str
    after: str
    caught_by: type[Exception]
    message: str | None = None
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name


FAULTS = (
    Fault(
        "no_barrier_before_a_tile_is_stored",
        "kernel.h",
        "sync_block();  // all waves are done with the tile before",
        "",
        EmulatorError,
        "shared memory race",
    ),
    Fault(
        "no_barrier_before_a_tile_is_read",
        "kernel.h",
        "loader.store();\n      sync_block();",
        "loader.store();",
        EmulatorError,
        "shared memory race",
    ),
    Fault(
        "no_wait_for_a_tile_before_the_barrier",
        "gcn.h",
        '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");',
        "",
        EmulatorError,
        "shared memory race",
    ),
    Fault(
        "rows_past_the_end_are_read",
        "kernel.h",
        "const int32_t rows = keys_left < kTileKV ? keys_left : kTileKV;",
        "const int32_t rows = kTileKV;",
        AssertionError,
    ),
    Fault(
        "keys_of_a_lane_as_in_another_layout",
        "softmax.h",
        "if (8 * (g / 4) + g % 4 > last_key)",
        "if (g > last_key)",
        AssertionError,
    ),
    Fault("mask_hides_one_key_less", "softmax.h", "g % 4 > last_key", "g % 4 > last_key + 1", AssertionError),
    Fault(
        "tiles_on_the_diagonal_are_not_masked",
        "kernel.h",
        "first_key + kTileKV - 1 > last_of_all",
        "last_of_all == -7",
        AssertionError,
    ),
    Fault(
        "halves_of_a_row_decide_apart",
        "softmax.h",
        "other_half(top, lane)",
        "((void)lane, top)",
        AssertionError,
    ),
    Fault(
        "earlier_products_are_not_rescaled",
        "softmax.h",
        "o[block] *= correction;",
        "(void)o[block];",
        AssertionError,
    ),
    Fault(
        "a_dead_row_is_corrected_by_its_reference",
        "softmax.h",
        "limit == -kInf ? 0.0f : exp2_approx(reference - raised)",
        "exp2_approx(reference - raised)",
        AssertionError,
    ),
    Fault(
        "quads_of_v_swapped", "kernel.h", "[quad / 2 % 2] = __builtin", "[1 - quad / 2 % 2] = __builtin", AssertionError
    ),
    Fault(
        "columns_of_v_read_where_they_were_not_stored",
        "kernel.h",
        "block * 32 + KeyLoader::place_of_column(column)",
        "block * 32 + column",
        AssertionError,
    ),
    Fault(
        "k_pe_steps_with_the_stride_of_k",
        "kernel.h",
        "thread / kChunksRope * k_pe.row_bytes",
        "thread / kChunksRope * k_nope.row_bytes",
        AssertionError,
    ),
    Fault(
        "lse_of_half_the_row",
        "kernel.h",
        "sum += other_half(sum, lane);",
        "sum += sum;",
        AssertionError,
    ),
    Fault("lse_in_base_2", "kernel.h", "log2_approx(sum)) * kLn2", "log2_approx(sum))", AssertionError),
)


def truncate(values: str, mask: str) -> str:
    return f"__builtin_bit_cast(f32x2, __builtin_bit_cast(u32x2, {values}) & {mask})"


NO_BIAS = "out: mean relative error -"
STORED = "*to = {pack<T>(low), pack<T>(high)};"
ROUNDING_FAULTS = (
    Fault("weights_bf16", "gcn.h", " + 0x8000u", "", AssertionError, NO_BIAS),
    Fault(
        "weights_fp16",
        "gcn.h",
        "return pack<T>(values);",
        f"return pack<T>({truncate('values', '0xffffe000u')});",
        AssertionError,
        NO_BIAS,
        torch.float16,
    ),
    *(
        Fault(
            f"results_{name}",
            "epilogue.h",
            STORED,
            f"low = {truncate('low', mask)}, high = {truncate('high', mask)}; {STORED}",
            AssertionError,
            NO_BIAS,
            dtype,
        )
        for name, mask, dtype in (("bf16", "0xffff0000u", torch.bfloat16), ("fp16", "0xffffe000u", torch.float16))
    ),
)


def attend(code: CodeObject, dtype: torch.dtype = torch.bfloat16, num_heads: int = 2) -> None:
    """A ragged batch, of large logits in the second call, against the oracle."""
    for scale in (None, 40.0):
        inputs = make_inputs(
            Case("faults", (45, 3, 1), (109, 33, 1), num_heads, True),
            dtype,
            layout="projection",
            after=40,
            scale=scale,
        )
        inputs.k[:64] /= 16  # of the first sequence, so that later keys have larger logits
        row, key = (part.start for part in inputs.bounds()[2])
        inputs.k[key] = -inputs.q[row, :, :128]  # the only logit is far below 0
        bounds = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
        out = torch.full(inputs.out_shape, NAN, dtype=dtype)
        lse = torch.full(inputs.lse_shape, NAN)
        arguments = {name: value for name, value in inputs.kwargs().items() if not name.endswith("descale")}
        plan = plan_tensor(plan_items(*bounds, num_heads, True, *MLA, "hip"))
        ragged_prefill(code, **arguments, plan=plan, out=out, lse=lse, wave_order=1)
        assert_matches_oracle(inputs, out, lse)


def with_fault(fault: Fault, folder: Path) -> CodeObject:
    csrc = folder / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    file = csrc / "hip" / fault.file
    source = file.read_text()
    assert source.count(fault.before) >= 1, "the source changed: plant the fault anew"
    file.write_text(source.replace(fault.before, fault.after))
    return CodeObject(compile_kernels(PREFILL[fault.dtype], "gfx942", folder / "kernels.co", csrc), OBJDUMP)


@pytest.mark.parametrize("num_heads", [2, 6])
def test_the_kernel_as_it_is(num_heads: int, dtype: torch.dtype) -> None:
    attend(code_object(PREFILL[dtype], "gfx942"), dtype, num_heads)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    code = with_fault(fault, tmp_path)
    with pytest.raises(fault.caught_by, match=fault.message):
        attend(code)


@pytest.mark.parametrize("fault", ROUNDING_FAULTS, ids=str)
def test_truncation_is_caught(fault: Fault, tmp_path: Path) -> None:
    """In the mean of more rows: no single error is too large."""
    code = with_fault(fault, tmp_path)
    with pytest.raises(fault.caught_by, match=fault.message):
        attend(code, fault.dtype, num_heads=6)


@pytest.mark.parametrize("counter", ["vmcnt", "lgkmcnt"])
def test_missing_waits_are_caught(counter: str) -> None:
    """The compiler places them, so they are taken out of the machine code."""
    code = copy.copy(code_object("prefill_bf16", "gfx942"))
    waits = re.compile(rf"{counter}\(\d+\) ?")
    code.instructions = {
        address: replace(instruction, operands=waits.sub("", instruction.operands) or "expcnt(0)")
        if instruction.name == "s_waitcnt"
        else instruction
        for address, instruction in code.instructions.items()
    }
    with pytest.raises(EmulatorError, match="before the wait"):
        attend(code)
