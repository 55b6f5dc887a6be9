"""Random ragged batches in random memory. HYPOTHESIS_PROFILE=explore searches further than CI does."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import Case
from helpers import (
    FP8,
    LAYOUTS,
    Inputs,
    assert_matches_oracle,
    assert_same_bits,
    check,
    cu_seqlens,
    make_inputs,
    place,
    quantize,
    run,
)
from hypothesis import given
from hypothesis import strategies as st

import mla_prefill

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, FP8])
DIMS = st.one_of(
    st.just((128, 64, 128)),
    st.tuples(st.integers(1, 40), st.integers(0, 24), st.integers(1, 40)),
)
Q_LENS = st.one_of(st.just(0), st.integers(1, 4), st.integers(1, 70))
KV_LENS = st.one_of(st.just(0), st.integers(1, 4), st.integers(1, 210))


@dataclass(frozen=True)
class Example:
    case: Case
    dtype: torch.dtype
    split_k: bool
    layouts: tuple[str, str, str, str, str]  # q, k, v, k_pe, out
    before: int
    after: int
    scale: float
    seed: int

    def inputs(self) -> Inputs:
        dtype = torch.float32 if self.dtype == FP8 else self.dtype
        inputs = make_inputs(
            self.case,
            dtype,
            split_k=self.split_k,
            before=self.before,
            after=self.after,
            outside=0.0 if self.dtype == FP8 else float("nan"),
            scale=self.scale,
            seed=self.seed,
        )
        if self.dtype == FP8:
            inputs = quantize(inputs, per_head=self.split_k)
        for name, layout in zip(("q", "k", "v", "k_pe"), self.layouts, strict=False):
            inputs = inputs.map_tensors(lambda x, layout=layout: place(x, layout), name)
        return inputs


@st.composite
def examples(draw: st.DrawFn, dtypes: st.SearchStrategy = DTYPES) -> Example:
    lens = draw(st.lists(st.tuples(Q_LENS, KV_LENS), max_size=5))
    layout = st.sampled_from(LAYOUTS)
    return Example(
        case=Case(
            "random",
            tuple(q for q, _ in lens),
            tuple(kv for _, kv in lens),
            num_heads=draw(st.integers(1, 5)),
            causal=draw(st.booleans()),
            head_dims=draw(DIMS),
        ),
        dtype=draw(dtypes),
        split_k=draw(st.booleans()),
        layouts=draw(st.tuples(layout, layout, layout, layout, layout)),
        before=draw(st.integers(0, 3)),
        after=draw(st.integers(0, 3)),
        scale=draw(st.sampled_from([192**-0.5, 0.3, 1.0, -0.1])),
        seed=draw(st.integers(0, 2**16)),
    )


@given(examples())
def test_matches_oracle(example: Example) -> None:
    check(example.inputs(), out_layout=example.layouts[4])


@given(examples(), st.integers(1, 4))
def test_a_plan_with_any_room_changes_nothing(example: Example, room: int) -> None:
    inputs = example.inputs()
    dims = (inputs.q.shape[2], 0, inputs.v.shape[2])
    rows = room * sum(example.case.q_lens)
    plan = mla_prefill.plan_prefill(
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        num_heads=example.case.num_heads,
        causal=example.case.causal,
        head_dims=dims,
        dtype=example.dtype,
        max_tokens_q=rows,
    )
    expected = run(inputs)
    for got, want in zip(run(inputs, plan=plan), expected, strict=True):
        assert_same_bits(got, want)


@given(examples(), st.data())
def test_each_sequence_is_the_same_alone(example: Example, data: st.DataObject) -> None:
    inputs = example.inputs()
    out, lse = run(inputs)
    bounds = inputs.bounds()
    if not bounds:
        return
    index = data.draw(st.integers(0, len(bounds) - 1))
    rows, _ = bounds[index]
    alone_out, alone_lse = run(inputs.sequence(index))
    assert_same_bits(alone_out, out[rows])
    assert_same_bits(alone_lse, lse[:, rows])


@given(examples(dtypes=st.sampled_from([torch.float32, torch.bfloat16])))
def test_split_k_is_joined_k(example: Example) -> None:
    inputs = replace(example, split_k=True).inputs()
    for got, want in zip(run(inputs), run(inputs.with_joined_k()), strict=True):
        assert_same_bits(got, want)


@given(examples(dtypes=st.sampled_from([torch.float32, torch.bfloat16])), st.data())
def test_any_cut_of_the_keys_accumulates_to_the_whole(example: Example, data: st.DataObject) -> None:
    """Keys cut anywhere, per sequence, the parts taken in either order; the later part may be causal."""
    inputs = example.inputs()
    cuts = []
    for rows, keys in inputs.bounds():
        len_q, len_k = rows.stop - rows.start, keys.stop - keys.start
        cuts.append(data.draw(st.integers(0, max(0, len_k - len_q) if inputs.causal else len_k)))

    def part(ranges: list[tuple[int, int]], causal: bool) -> Inputs:
        index = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(low, high) for low, high in ranges)])
        chosen = inputs.map_tensors(lambda x: x[index], "k", "v", "k_pe")
        return replace(chosen, cu_seqlens_k=cu_seqlens([high - low for low, high in ranges]), causal=causal)

    starts = [keys.start for _, keys in inputs.bounds()]
    stops = [keys.stop for _, keys in inputs.bounds()]
    middles = [start + cut for start, cut in zip(starts, cuts, strict=True)]
    context = part(list(zip(starts, middles, strict=True)), False)
    rest = part(list(zip(middles, stops, strict=True)), inputs.causal)
    first, second = (context, rest) if data.draw(st.booleans(), label="context first") else (rest, context)
    out, lse = run(first)
    mla_prefill.ragged_prefill(**second.kwargs(), out=out, lse=lse, accumulate=True)
    assert_matches_oracle(inputs, out, lse, passes=2)
