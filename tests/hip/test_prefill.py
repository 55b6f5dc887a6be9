"""The compiled prefill kernel, run in the emulator against the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from cases import CASES, MLA, Case
from gfx9 import Emulator
from helpers import (
    INF,
    NAN,
    Inputs,
    assert_matches_oracle,
    assert_same_bits,
    embed,
    make_inputs,
    partial_passes,
)
from kernels import ARCHITECTURES, code_object, plan_tensor, ragged_prefill
from torch import Tensor

from mla_prefill._C import plan_items

pytestmark = pytest.mark.usefixtures("toolchain")

ARCH = pytest.mark.parametrize("arch", ARCHITECTURES)
BOTH_MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
RAGGED = Case("ragged", (130, 0, 37, 3, 9), (130, 20, 200, 0, 5), 2, True)
SMALL = Case("small", (3, 40), (35, 70), 1, True)
BF16 = torch.bfloat16


def work(case: Case) -> int:
    """32 x 32 tiles of a case, and what comes with each head of a sequence: roughly 10 ms each."""
    return case.num_heads * sum(
        4 + -(-q // 32) * -(-k // 32) for q, k in zip(case.q_lens, case.kv_lens, strict=True) if q
    )


TABLE = [case for case in CASES if case.head_dims == MLA and work(case) <= 500]


@dataclass
class Result:
    out: Tensor
    lse: Tensor
    emulator: Emulator


def run(
    inputs: Inputs,
    arch: str = "gfx942",
    *,
    state: tuple[Tensor, Tensor] | None = None,
    layout: str = "dense",
    **options: int,
) -> Result:
    """Into poisoned outputs amid canaries, or onto a running state."""
    out = embed(inputs.out_shape, inputs.out_dtype, layout=layout)
    lse = embed(inputs.lse_shape, torch.float32, layout=layout)
    out.view.copy_(state[0] if state else torch.tensor(NAN))
    lse.view.copy_(state[1] if state else torch.tensor(NAN))
    items = plan_items(
        inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist(), inputs.q.shape[1], inputs.causal, *MLA, "hip"
    )
    plan = plan_tensor(items)
    untouched = plan.clone()
    emulator = ragged_prefill(
        code_object("prefill_bf16" if inputs.q.dtype == BF16 else "prefill_fp16", arch),
        **{name: value for name, value in inputs.kwargs().items() if not name.endswith("descale")},
        plan=plan,
        out=out.view,
        lse=lse.view,
        accumulate=state is not None,
        **options,
    )
    assert torch.equal(plan, untouched), "the counters must be back at 0 for the next layer"
    out.assert_rest_untouched()
    lse.assert_rest_untouched()
    if state is None:
        first, last = int(inputs.cu_seqlens_q[0]), int(inputs.cu_seqlens_q[-1])
        for rows in (slice(0, first), slice(last, None)):
            assert out.view[rows].isnan().all() and lse.view[:, rows].isnan().all(), "rows outside were written"
    return Result(out.view, lse.view, emulator)


def check(inputs: Inputs, arch: str = "gfx942", **options: object) -> Result:
    result = run(inputs, arch, **options)
    assert_matches_oracle(inputs, result.out, result.lse)
    return result


def assert_same(got: Result, expected: Result) -> None:
    assert_same_bits(got.out, expected.out)
    assert_same_bits(got.lse, expected.lse)


# ---- right answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_table(case: Case) -> None:
    """K and V are slices of a projection, NaN lies before and behind all sequences."""
    check(make_inputs(case, BF16, layout="projection", before=3, after=5), wave_order=len(case.name))


@ARCH
@BOTH_MASKS
def test_ragged_on_all_architectures(arch: str, causal: bool, dtype: torch.dtype) -> None:
    check(make_inputs(replace(RAGGED, causal=causal), dtype, layout="projection", before=3, after=5), arch)


@pytest.mark.parametrize("layout", ["head_major", "sliced", "padded_rows"])
def test_layouts_do_not_change_bits(layout: str, dtype: torch.dtype) -> None:
    case = replace(SMALL, num_heads=2)
    expected = check(make_inputs(case, dtype))
    for split_k in (True, False):
        inputs = make_inputs(case, dtype, split_k=split_k)
        laid_out = inputs.map_tensors(lambda x: with_even_strides(x, layout), "q", "k", "v", "k_pe")
        assert_same(run(laid_out), expected)


def with_even_strides(values: Tensor, layout: str) -> Tensor:
    """As ``helpers.place``, with strides of multiples of 4 bytes."""
    order = [1, 0, 2] if layout == "head_major" and values.dim() == 3 else list(range(values.dim()))
    wider = [values.shape[i] for i in order]
    wider[-1] += 6 if layout == "sliced" else 0
    wider[-2] += 1 if layout == "padded_rows" else 0
    buffer = torch.full((*wider,), NAN, dtype=values.dtype).permute(order)
    view = buffer[tuple(slice(size) for size in values.shape)]
    return view.copy_(values)


@pytest.mark.parametrize("first_row", [0, 40_000_000], ids=["near", "far"])
def test_outputs_in_any_layout(first_row: int) -> None:
    """Both reach beyond 2^31 elements where they begin that many rows before."""
    inputs = make_inputs(replace(SMALL, num_heads=2), BF16)
    expected = run(inputs)
    out = torch.full((inputs.q.shape[0], 3, 140), NAN, dtype=BF16)[:, :2, :128]
    lse = torch.full((inputs.q.shape[0], 60), NAN).t()[:2]
    plan = plan_tensor(plan_items(inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist(), 2, True, *MLA, "hip"))
    arguments = {name: value for name, value in inputs.kwargs().items() if not name.endswith("descale")}
    arguments |= {"plan": plan, "first_row": first_row}
    ragged_prefill(code_object("prefill_bf16", "gfx942"), **arguments, out=out, lse=lse)
    assert_same_bits(out, expected.out)
    assert_same_bits(lse, expected.lse)
    out.fill_(NAN)
    ragged_prefill(code_object("prefill_bf16", "gfx942"), **arguments, out=out, lse=None)
    assert_same_bits(out, expected.out)


@BOTH_MASKS
def test_offsets_beyond_32_bits(causal: bool) -> None:
    """A10: rows * stride is above 2^32 elements. No such tensor is there, only the part of it that is read."""
    inputs = make_inputs(replace(SMALL, num_heads=2, causal=causal), BF16, layout="projection")
    expected = run(inputs)
    assert_same(run(inputs, first_row=40_000_000), expected)


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_large_logits(scale: float, dtype: torch.dtype) -> None:
    """Of 1e3 to 1e4 and both signs; the second sequence has only one, far below 0."""
    inputs = make_inputs(Case("large", (40, 1), (100, 1), 1, True), dtype, scale=scale)
    inputs.k[-1] = -inputs.q[-1, :, :128]
    check(inputs)


@ARCH
def test_maximum_that_rises_at_every_tile(arch: str, dtype: torch.dtype) -> None:
    """Each key tile has larger logits than the one before, by more than the softmax tolerates without rescaling."""
    inputs = make_inputs(Case("rising", (33,), (160,), 1, False), dtype)
    rising = torch.arange(160).div(32, rounding_mode="floor").reshape(-1, 1, 1) * 24.0
    inputs.q[..., 0] = 1.0 + inputs.q[..., 0].abs()
    inputs.k[..., 0] = rising[..., 0].to(dtype)
    check(replace(inputs, scale=1.0), arch)


@ARCH
def test_many_small_weights_in_fp16(arch: str) -> None:
    """Below 2^-14 of the largest: gfx90a takes subnormal fp16 operands as 0, and they must not get lost."""
    inputs = make_inputs(Case("small_weights", (4,), (1200,), 1, False), torch.float16)
    inputs.q.zero_()
    inputs.q[..., 0] = 1.0
    inputs.k[...] = 0.0
    inputs.k[7, :, 0] = 10.4  # the weight of the others is 2^-15
    check(replace(inputs, scale=1.0), arch)


# ---- what must not matter --------------------------------------------------------------------------------------------


def test_a_sequence_gives_the_same_bits_alone() -> None:
    inputs = make_inputs(RAGGED, BF16, layout="projection", before=2)
    together = run(inputs)
    for index, (rows, _) in enumerate(inputs.bounds()):
        if rows.stop > rows.start:
            alone = run(inputs.sequence(index), num_blocks=1)
            assert_same_bits(together.out[rows], alone.out)
            assert_same_bits(together.lse[:, rows], alone.lse)


def test_order_of_waves_and_blocks_does_not_matter() -> None:
    inputs = make_inputs(SMALL, BF16)
    expected = run(inputs)
    for seed in range(1, 4):
        assert_same(run(inputs, wave_order=seed, num_blocks=seed), expected)


@pytest.mark.parametrize("value", [NAN, INF])
def test_foreign_rows_do_not_matter(value: float, dtype: torch.dtype) -> None:
    """Neighbours hold NaN or inf: the rows before and behind the sequence, and whole sequences beside it."""
    case = Case("neighbours", (33, 40, 20), (33, 65, 20), 1, True)
    inputs = make_inputs(case, dtype, layout="projection", before=4, after=40, outside=value)
    expected = check(inputs)
    rows, keys = inputs.bounds()[1]
    for x, kept in ((inputs.q, rows), (inputs.k, keys), (inputs.v, keys), (inputs.k_pe, keys)):
        x[: kept.start], x[kept.stop :] = value, value
    got = run(inputs)
    assert_same_bits(got.out[rows], expected.out[rows])
    assert_same_bits(got.lse[:, rows], expected.lse[:, rows])


def test_later_keys_do_not_matter() -> None:
    """Rows of a tile that ends before them: they are not read."""
    inputs = make_inputs(Case("later", (200,), (200,), 1, True), BF16)
    expected = run(inputs)
    for x in (inputs.k, inputs.v, inputs.k_pe):
        x[128:] = NAN
    assert_same_bits(run(inputs).out[:128], expected.out[:128])


# ---- running states --------------------------------------------------------------------------------------------------


@ARCH
def test_accumulate_chunks(arch: str, dtype: torch.dtype) -> None:
    """New tokens, then two context chunks, some of them empty, folded into one state."""
    case = Case("chunks", (40, 5, 0, 3), (100, 5, 7, 40), 2, True)
    inputs = make_inputs(case, dtype)
    passes = partial_passes(inputs, 2)
    state = (torch.full(inputs.out_shape, NAN, dtype=dtype), torch.full(inputs.lse_shape, -INF))
    for one in passes:
        result = run(one, arch, state=state)
        state = (result.out, result.lse)
    assert_matches_oracle(inputs, *state, passes=len(passes))


@pytest.mark.parametrize("mark", [INF, -INF], ids=["+inf", "-inf"])
def test_dead_state_is_replaced(mark: float) -> None:
    inputs = make_inputs(SMALL, BF16)
    expected = run(inputs)
    dead = (torch.full(inputs.out_shape, NAN, dtype=BF16), torch.full(inputs.lse_shape, mark))
    assert_same(run(inputs, state=dead), expected)


@pytest.mark.parametrize("apart", [300.0, -300.0])
def test_a_state_that_weighs_nothing_changes_nothing(apart: float) -> None:
    """Weights relative to the larger lse stay finite."""
    inputs = make_inputs(SMALL, BF16)
    own = run(inputs)
    state = torch.randn(inputs.out_shape).to(BF16), own.lse + apart
    got = run(inputs, state=state)
    expected_out, expected_lse = state if apart > 0 else (own.out, own.lse)
    assert_same_bits(got.out, expected_out)
    assert_same_bits(got.lse, expected_lse)


def test_rows_without_keys_leave_a_live_state() -> None:
    """And make a dead one (0, -inf). Sequence 0 has no keys; of sequence 1 the causal mask hides all from some rows."""
    inputs = make_inputs(Case("no_keys", (5, 40), (0, 9), 2, True), BF16)
    out, lse = torch.randn(inputs.out_shape).to(BF16), torch.randn(inputs.lse_shape)
    out[0, 0] = -0.0
    lse[0, 2], lse[1, 2] = INF, -INF
    out[2] = NAN
    got = run(inputs, state=(out, lse))
    kept = [0, 1, 3, 4, *range(5, 36)]
    assert_same_bits(got.out[kept], out[kept])
    assert_same_bits(got.lse[:, kept], lse[:, kept])
    assert (got.out[2] == 0).all() and torch.isneginf(got.lse[:, 2]).all()
    assert not torch.equal(got.out[36:], out[36:])
