"""Faults planted in the kernel's source: each must be caught, by a check of the emulator or by the oracle."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import MLA, Case
from gfx9 import CodeObject, EmulatorError
from helpers import NAN, assert_matches_oracle, make_inputs
from kernels import OBJDUMP, ROOT, compile_kernels, plan_tensor, ragged_prefill

from mla_prefill._C import plan_items

pytestmark = pytest.mark.usefixtures("toolchain")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    before: str
    after: str
    caught_by: type[Exception]
    message: str | None = None

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


def attend(csrc: Path, folder: Path) -> None:
    """A ragged batch with two heads, of large logits in the second call, against the oracle."""
    code = CodeObject(compile_kernels("prefill_bf16", "gfx942", folder / "kernels.co", csrc), OBJDUMP)
    for scale in (None, 40.0):
        inputs = make_inputs(
            Case("faults", (45, 3, 1), (109, 33, 1), 2, True),
            torch.bfloat16,
            layout="projection",
            after=40,
            scale=scale,
        )
        inputs.k[:64] /= 16  # of the first sequence, so that later keys have larger logits
        row, key = (part.start for part in inputs.bounds()[2])
        inputs.k[key] = -inputs.q[row, :, :128]  # the only logit is far below 0
        bounds = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
        out = torch.full(inputs.out_shape, NAN, dtype=torch.bfloat16)
        lse = torch.full(inputs.lse_shape, NAN)
        arguments = {name: value for name, value in inputs.kwargs().items() if not name.endswith("descale")}
        plan = plan_tensor(plan_items(*bounds, 2, True, *MLA, "hip"))
        ragged_prefill(code, **arguments, plan=plan, out=out, lse=lse, wave_order=1)
        assert_matches_oracle(inputs, out, lse)


def test_the_kernel_as_it_is(tmp_path: Path) -> None:
    attend(ROOT / "csrc", tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    file = csrc / "hip" / fault.file
    source = file.read_text()
    assert source.count(fault.before) >= 1, "the source changed: plant the fault anew"
    file.write_text(source.replace(fault.before, fault.after))
    with pytest.raises(fault.caught_by, match=fault.message):
        attend(csrc, tmp_path)
