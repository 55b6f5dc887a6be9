"""What ragged_prefill promises beside being right: isolation, accumulation, and bits that never depend on company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases import MLA, Case
from helpers import (
    INF,
    NAN,
    accumulate,
    assert_matches_oracle,
    assert_same_bits,
    bits,
    check,
    cu_seqlens,
    make_inputs,
    partial_passes,
    quantize,
    run,
    skip_refused,
    skip_without_kernel,
)

import mla_prefill

RAGGED = Case("ragged", (33, 0, 5, 1, 70, 300, 4), (70, 3, 0, 97, 70, 310, 2), 3, True)
FULL = replace(RAGGED, name="ragged_full", causal=False)
MASKS = pytest.mark.parametrize("case", [RAGGED, FULL], ids=str)
HOSTILE = pytest.mark.parametrize("hostile", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])


@pytest.fixture
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


# ---- rows of nobody, and of others -----------------------------------------------------------------------------------


@HOSTILE
@MASKS
def test_rows_outside_sequences_have_no_influence(case: Case, hostile: float, dtype: torch.dtype, device: str) -> None:
    """The first sequence starts above row 0, rows follow the last one (AX3), and all of them hold NaN or inf."""
    inputs = make_inputs(case, dtype, device, before=3, after=37, outside=hostile)
    out, lse = run(inputs)
    assert_matches_oracle(inputs, out, lse)
    clean = run(make_inputs(case, dtype, device))
    assert_same((out[3:-37], lse[:, 3:-37]), clean)


@HOSTILE
@MASKS
def test_neighbours_have_no_influence(case: Case, hostile: float, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device)
    clean_out, clean_lse = run(inputs)
    for rows, keys in inputs.bounds():
        if rows.start == rows.stop:
            continue

        def only(part: slice) -> object:
            def keep(x: torch.Tensor) -> torch.Tensor:
                kept = torch.full_like(x, hostile)
                kept[part] = x[part]
                return kept

            return keep

        others_hostile = inputs.map_tensors(only(rows), "q").map_tensors(only(keys), "k", "v", "k_pe")
        out, lse = run(others_hostile)
        assert_same((out[rows], lse[:, rows]), (clean_out[rows], clean_lse[:, rows]))


@HOSTILE
def test_keys_of_a_sequence_without_rows_have_no_influence(hostile: float, dtype: torch.dtype, device: str) -> None:
    """Gaps between sequences: keys that only a sequence with Lq = 0 owns."""
    inputs = make_inputs(Case("gap", (20, 0, 20), (50, 30, 40), 2, False), dtype, device)
    clean = run(inputs)
    for x in (inputs.k, inputs.v, inputs.k_pe):
        x[50:80] = hostile
    assert_same(run(inputs), clean)


def test_AX3_rows_behind_the_last_sequence_are_left_alone(dtype: torch.dtype, device: str) -> None:
    """The reported q.shape[0] = 8126 with cu_q[-1] = 8125, at an eighth; `run` looks at the last row."""
    inputs = make_inputs(Case("AX3", (1000, 15), (15, 20), 1, True), dtype, device, after=1)
    out, _ = run(inputs)
    assert out.shape[0] == 1016


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((), ()), ((0,), (0,)), ((0, 0), (3, 4)), ((2, 3), (0, 0)), ((0,) * 1000, (0,) * 1000)],
    ids=["no_sequence", "no_row_no_key", "no_row", "no_key", "thousand_empty"],
)
@pytest.mark.parametrize("after", [0, 2])
def test_A28_nothing_to_do_is_legal(q_lens: tuple, kv_lens: tuple, after: int, dtype: torch.dtype, device: str) -> None:
    for causal in (True, False):
        inputs = make_inputs(Case("A28", q_lens, kv_lens, 2, causal), dtype, device, after=after)
        out, lse = run(inputs)
        total = sum(q_lens)
        assert (out[:total] == 0).all() and torch.isneginf(lse[:, :total]).all()


@pytest.mark.parametrize("overlap", ["q", "k"])
def test_two_sequences_may_share_input_rows_of_a_buffer(overlap: str, device: str) -> None:
    """Strides of 0 are legal in inputs: one head or row serves all."""
    case = Case("shared", (4, 6), (9, 11), 3, True)
    inputs = make_inputs(case, torch.bfloat16, device, split_k=False)
    expected = inputs.map_tensors(lambda x: x[:, :1].expand(-1, 3, -1).contiguous(), overlap)
    shared = inputs.map_tensors(lambda x: x[:, :1].expand(-1, 3, -1), overlap)
    assert_same(run(shared), run(expected))


# ---- accumulate = merge = one pass -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True], ids=["new_tokens_first", "context_first"])
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@MASKS
def test_accumulate_is_one_pass(case: Case, num_chunks: int, backwards: bool, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device)
    passes = partial_passes(inputs, num_chunks)
    if backwards:
        passes.reverse()
    in_place = accumulate(passes, out_layout="sliced")
    assert_matches_oracle(inputs, *in_place, passes=len(passes))


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@MASKS
def test_merge_is_one_pass(case: Case, num_chunks: int, dtype: torch.dtype, device: str) -> None:
    skip_without_kernel("merge_states", device)
    inputs = make_inputs(case, dtype, device)
    passes = partial_passes(inputs, num_chunks)
    out, lse = run(passes[0])
    for one in passes[1:]:
        out, lse = mla_prefill.merge_states(out, lse, *run(one))
    assert_matches_oracle(inputs, out, lse, passes=len(passes))


def test_accumulate_of_float8(device: str) -> None:
    inputs = quantize(make_inputs(RAGGED, torch.float32, device))
    skip_refused(inputs)
    passes = partial_passes(inputs, 3)
    assert_matches_oracle(inputs, *accumulate(passes), passes=len(passes))


def test_oracle_accumulates_too(device: str) -> None:
    inputs = make_inputs(RAGGED, torch.float64, device)
    expected = mla_prefill.reference.ragged_prefill(**inputs.kwargs(), return_lse=True)
    out = torch.full(inputs.out_shape, NAN, dtype=torch.float64, device=device)
    lse = torch.full(inputs.lse_shape, INF, dtype=torch.float64, device=device)
    for one in partial_passes(inputs, 3):
        out, lse = mla_prefill.reference.ragged_prefill(
            **one.kwargs(), out=out, lse=lse, accumulate=True, return_lse=True
        )
    torch.testing.assert_close(out, expected[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(lse, expected[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("mark", [INF, -INF], ids=["+inf", "-inf"])
@pytest.mark.parametrize("payload", [NAN, INF, 3.0])
@MASKS
def test_A05_a_dead_running_state_has_weight_0(
    case: Case, payload: float, mark: float, dtype: torch.dtype, device: str
) -> None:
    """Whatever out holds: the result is the pass alone, and where that saw no key either, 0 and -inf."""
    inputs = make_inputs(case, dtype, device)
    expected = run(inputs)
    out = torch.full(inputs.out_shape, payload, dtype=dtype, device=device)
    lse = torch.full(inputs.lse_shape, mark, device=device)
    mla_prefill.ragged_prefill(**inputs.kwargs(), out=out, lse=lse, accumulate=True)
    assert_same((out, lse), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_A02_a_pass_without_keys_leaves_the_running_state_alone(causal: bool, dtype: torch.dtype, device: str) -> None:
    """The second chunk of A02: request 2 has no keys in it."""
    first = make_inputs(Case("first", (64, 64), (80, 90), 2, False), dtype, device)
    out, lse = run(first)
    before = out.clone(), lse.clone()
    second = make_inputs(Case("second", (64, 64), (100, 0), 2, causal), dtype, device, seed=1)
    mla_prefill.ragged_prefill(**replace(second, q=first.q).kwargs(), out=out, lse=lse, accumulate=True)
    assert_same((out[64:], lse[:, 64:]), (before[0][64:], before[1][:, 64:]))
    assert (bits(out[:64]) != bits(before[0][:64])).any()


def test_accumulate_leaves_rows_outside_sequences_alone(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(RAGGED, dtype, device, before=2, after=5)
    out = torch.full(inputs.out_shape, NAN, dtype=dtype, device=device)
    lse = torch.full(inputs.lse_shape, NAN, device=device)
    lse[:, 2:-5] = -INF
    mla_prefill.ragged_prefill(**inputs.kwargs(), out=out, lse=lse, accumulate=True)
    for rows in (slice(0, 2), slice(-5, None)):
        assert out[rows].isnan().all() and lse[:, rows].isnan().all()
    assert not out[2:-5].isnan().any() and not lse[:, 2:-5].isnan().any()


@pytest.mark.parametrize("gap", [-200.0, 200.0], ids=["state_dominates_not", "state_dominates"])
def test_accumulate_of_states_far_apart(gap: float, dtype: torch.dtype, device: str) -> None:
    """exp(lse) of either side overflows or vanishes; the weights must not."""
    inputs = make_inputs(FULL, dtype, device)
    own_out, own_lse = run(inputs)
    live = torch.isfinite(own_lse)
    out = torch.full_like(own_out, 2.0)
    lse = own_lse.where(live, torch.zeros_like(own_lse)) + gap
    mla_prefill.ragged_prefill(**inputs.kwargs(), out=out, lse=lse, accumulate=True)
    rows = live.all(dim=0)
    assert_same_bits(out[rows], torch.full_like(own_out, 2.0)[rows] if gap > 0 else own_out[rows])
    torch.testing.assert_close(lse[:, rows], own_lse[:, rows] + max(gap, 0.0))


# ---- the same bits, whatever is around -------------------------------------------------------------------------------


@MASKS
def test_a_sequence_alone_and_in_its_batch(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device, layout="projection")
    out, lse = run(inputs)
    for index, (rows, _) in enumerate(inputs.bounds()):
        assert_same(run(inputs.sequence(index)), (out[rows], lse[:, rows]))


@MASKS
def test_a_sequence_at_any_place_of_any_batch(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device)
    out, lse = run(inputs)
    generator = torch.Generator().manual_seed(1)
    bounds = inputs.bounds()
    for _ in range(3):
        # Some sequences, in any order, some of them twice, behind a few rows of nobody.
        chosen = torch.randint(len(bounds), (len(bounds),), generator=generator).tolist()
        rows = torch.cat(
            [torch.zeros(5, dtype=torch.long), *(torch.arange(bounds[b][0].start, bounds[b][0].stop) for b in chosen)]
        )
        keys = torch.cat(
            [torch.zeros(2, dtype=torch.long), *(torch.arange(bounds[b][1].start, bounds[b][1].stop) for b in chosen)]
        )
        mixed = inputs.map_tensors(lambda x, rows=rows: x[rows.to(x.device)], "q")
        mixed = mixed.map_tensors(lambda x, keys=keys: x[keys.to(x.device)], "k", "v", "k_pe")
        mixed = replace(
            mixed,
            cu_seqlens_q=cu_seqlens([bounds[b][0].stop - bounds[b][0].start for b in chosen], device, 5),
            cu_seqlens_k=cu_seqlens([bounds[b][1].stop - bounds[b][1].start for b in chosen], device, 2),
        )
        mixed_out, mixed_lse = run(mixed)
        assert_same((mixed_out[5:], mixed_lse[:, 5:]), (out[rows[5:]], lse[:, rows[5:]]))


def test_heads_do_not_matter_to_each_other(dtype: torch.dtype, device: str) -> None:
    """A rank with a part of the heads computes the same bits."""
    inputs = make_inputs(replace(RAGGED, num_heads=7), dtype, device)
    out, lse = run(inputs)
    for heads in (slice(0, 1), slice(2, 6), slice(6, 7)):
        part = run(inputs.map_tensors(lambda x, heads=heads: x[:, heads], "q", "k", "v"))
        assert_same(part, (out[:, heads], lse[heads]))


@MASKS
def test_runs_repeat_bit_for_bit(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device)
    expected = run(inputs)
    for _ in range(5):
        assert_same(run(inputs), expected)


@MASKS
def test_threads_do_not_change_bits(case: Case, dtype: torch.dtype, restore_threads: None) -> None:
    inputs = make_inputs(case, dtype)
    results = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(run(inputs))
    for result in results[1:]:
        assert_same(result, results[0])


@MASKS
def test_split_k_is_joined_k(case: Case, dtype: torch.dtype, device: str) -> None:
    split = make_inputs(case, dtype, device, layout="projection")
    assert_same(run(split), run(split.with_joined_k()))


@pytest.mark.parametrize(
    "dims", [(1, 1, 1), (15, 1, 4), (16, 16, 16), (17, 31, 5), (5, 100, 3), (128, 64, 128)], ids=str
)
def test_split_k_is_joined_k_wherever_the_seam_is(dims: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    split = make_inputs(Case("seam", (20, 3), (50, 9), 2, True, dims), dtype, device)
    assert_same(run(split), run(split.with_joined_k()))


@pytest.mark.parametrize("factor", [8, 1, 0], ids=["eight_times", "true", "zero"])
@MASKS
def test_AX4_AX5_max_seqlen_hints_never_change_results(
    case: Case, factor: int, dtype: torch.dtype, device: str
) -> None:
    """Too large costs speed only. Too small may be refused, by name; if it isn't, it is harmless."""
    inputs = make_inputs(case, dtype, device)
    expected = run(inputs)
    hints = {"max_seqlen_q": factor * max(case.q_lens), "max_seqlen_k": factor * max(case.kv_lens)}
    for names in (["max_seqlen_q"], ["max_seqlen_k"], ["max_seqlen_q", "max_seqlen_k"]):
        try:
            result = run(inputs, **{name: hints[name] for name in names})
        except (RuntimeError, ValueError) as error:
            assert factor == 0 and str(error).startswith("max_seqlen_")
        else:
            assert_same(result, expected)


@pytest.mark.parametrize("room", [1, 3], ids=["exact", "with_room"])
@MASKS
def test_a_given_plan_changes_nothing(case: Case, room: int, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device)
    plan = mla_prefill.plan_prefill(
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        num_heads=case.num_heads,
        causal=case.causal,
        head_dims=MLA,
        dtype=dtype,
        max_tokens_q=room * sum(case.q_lens),
    )
    expected = run(inputs)
    before = plan.tensor.clone()
    for _ in range(2):  # a plan serves every layer of a step
        assert_same(run(inputs, plan=plan), expected)
    assert torch.equal(plan.tensor, before)


def test_inputs_are_only_read(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(RAGGED, dtype, device, layout="padded_rows")
    names = ("q", "k", "v", "k_pe")
    before = {name: getattr(inputs, name).clone() for name in names}
    check(inputs)
    for name in names:
        assert_same_bits(getattr(inputs, name), before[name])
