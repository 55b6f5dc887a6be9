"""plan_context_chunks: properties that any plan must have, and the cases users met."""

from __future__ import annotations

import math
import sys
from itertools import accumulate
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_prefill.context_chunks import ContextChunk, plan_context_chunks


def check_plan(
    chunks: list[ContextChunk],
    context_lens: list[int],
    workspace_rows: int,
    block_size: int,
    world_size: int = 1,
    interleave: int = 1,
) -> None:
    unit = interleave * world_size
    covered = dict.fromkeys(range(len(context_lens)), 0)
    chunks_of: dict[int, list[int]] = {}
    for position, chunk in enumerate(chunks):
        assert chunk.index == position
        assert chunk.num_requests == len(chunk.starts) == len(chunk.seq_lens) > 0
        assert chunk.cu_seq_lens == list(accumulate(chunk.seq_lens, initial=0))
        assert chunk.num_context_tokens == sum(chunk.seq_lens) > 0
        assert chunk.max_seq_len == max(chunk.seq_lens)
        assert chunk.num_context_tokens <= workspace_rows
        assert chunk.seq_lens[0] > 0 and chunk.seq_lens[-1] > 0
        assert chunk.is_continuation == (chunk.starts[0] > 0)
        assert not any(chunk.starts[1:]), "only the first request of a chunk may be a continuation"
        for request, start, length in zip(
            range(chunk.request_slice.start, chunk.request_slice.stop), chunk.starts, chunk.seq_lens, strict=True
        ):
            assert start == covered[request]
            assert length > 0 or context_lens[request] == 0
            assert start % (block_size * world_size) == 0
            covered[request] += length
            if length:
                chunks_of.setdefault(request, []).append(position)
        if world_size == 1:
            assert chunk.local_starts == chunk.padded_local_seq_lens == chunk.local_context_lens_allranks == []
            continue
        assert chunk.local_starts == [start // world_size for start in chunk.starts]
        assert all(start % block_size == 0 for start in chunk.local_starts)
        assert chunk.padded_local_seq_lens == [math.ceil(length / unit) * interleave for length in chunk.seq_lens]
        assert chunk.padded_local_cu_seq_lens == list(accumulate(chunk.padded_local_seq_lens, initial=0))
        assert chunk.padded_local_cu_seq_lens[-1] * world_size <= workspace_rows
        for request, lens in enumerate(chunk.local_context_lens_allranks, chunk.request_slice.start):
            assert lens == tokens_per_rank(context_lens[request], world_size, interleave)
    assert covered == dict(enumerate(context_lens))
    for positions in chunks_of.values():
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def tokens_per_rank(tokens: int, world_size: int, interleave: int) -> list[int]:
    """By the definition: token t is on rank t // interleave % world_size."""
    lens = [0] * world_size
    for token in range(tokens):
        lens[token // interleave % world_size] += 1
    return lens


@given(
    context_lens=st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 700)), max_size=30),
    block_size=st.sampled_from([1, 2, 16, 64]),
    world_size=st.sampled_from([1, 1, 2, 3, 8]),
    interleave_exponent=st.integers(0, 6),
    spare=st.integers(0, 500),
)
def test_any_plan(
    context_lens: list[int], block_size: int, world_size: int, interleave_exponent: int, spare: int
) -> None:
    interleave = math.gcd(2**interleave_exponent, block_size)
    workspace_rows = block_size * world_size + spare
    chunks = plan_context_chunks(
        context_lens,
        workspace_rows=workspace_rows,
        block_size=block_size,
        dcp_world_size=world_size,
        dcp_interleave=interleave,
    )
    check_plan(chunks, context_lens, workspace_rows, block_size, world_size, interleave)


@given(context_lens=st.lists(st.integers(0, 300), max_size=20), spare=st.integers(0, 300))
def test_greedy_leaves_less_than_a_block_unused(context_lens: list[int], spare: int) -> None:
    chunks = plan_context_chunks(context_lens, workspace_rows=16 + spare, block_size=16)
    for chunk in chunks[:-1]:
        assert 16 + spare - chunk.num_context_tokens < 16


@given(context_lens=st.lists(st.integers(1, 300), max_size=20), zeros=st.lists(st.integers(0, 20), max_size=10))
def test_requests_without_context_cost_nothing(context_lens: list[int], zeros: list[int]) -> None:
    def rows(lens: list[int]) -> list[list[tuple[int, int]]]:
        chunks = plan_context_chunks(lens, workspace_rows=128, block_size=16)
        return [[(s, n) for s, n in zip(c.starts, c.seq_lens, strict=True) if n] for c in chunks]

    mixed = list(context_lens)
    for position in zeros:
        mixed.insert(position, 0)
    assert rows(mixed) == rows(context_lens)


def test_nothing_to_do() -> None:
    assert plan_context_chunks([], workspace_rows=64, block_size=64) == []
    assert plan_context_chunks([0, 0, 0], workspace_rows=64, block_size=64) == []


def test_packing_by_example() -> None:
    chunks = plan_context_chunks([0, 100, 0, 130, 0, 20, 0], workspace_rows=192, block_size=64)
    assert [(c.request_slice, c.starts, c.seq_lens) for c in chunks] == [
        (slice(1, 4), [0, 0, 0], [100, 0, 64]),
        (slice(3, 6), [64, 0, 0], [66, 0, 20]),
    ]
    assert [c.is_continuation for c in chunks] == [False, True]


@pytest.mark.parametrize("prefixes", [[20000, 2500], [2500, 20000]])
def test_prefixes_of_different_lengths(prefixes: list[int]) -> None:
    """A06: no request may appear in a chunk without rows."""
    chunks = plan_context_chunks(prefixes, workspace_rows=8192, block_size=64)
    check_plan(chunks, prefixes, 8192, 64)
    assert all(length > 0 for chunk in chunks for length in chunk.seq_lens)
    assert len(chunks) == 3


@pytest.mark.parametrize("context_len", [131072, 1_000_000])
def test_no_length_limit(context_len: int) -> None:
    """AX10, AX15: a long context takes more chunks, never more rows."""
    chunks = plan_context_chunks([context_len], workspace_rows=65536, block_size=64)
    assert max(chunk.num_context_tokens for chunk in chunks) == 65536
    assert len(chunks) == math.ceil(context_len / 65536)


def test_a_whole_prompt_hit_but_for_one_token() -> None:
    """A25: context alone decides; a single chunk holds all of it."""
    (chunk,) = plan_context_chunks([4095], workspace_rows=65536, block_size=64)
    assert (chunk.starts, chunk.seq_lens, chunk.is_continuation) == ([0], [4095], False)


def test_decode_context_parallel_splits_at_virtual_blocks() -> None:
    """A26: with an interleave above 1, a split at a plain block would straddle ranks."""
    chunks = plan_context_chunks([1000], workspace_rows=300, block_size=16, dcp_world_size=4, dcp_interleave=8)
    check_plan(chunks, [1000], 300, 16, 4, 8)
    assert [chunk.seq_lens for chunk in chunks] == [[256], [256], [256], [232]]
    assert chunks[-1].padded_local_seq_lens == [64]  # 232 tokens are 7.25 rounds of 32: 8 units of 8 on each rank
    assert chunks[-1].local_context_lens_allranks == [[256, 248, 248, 248]]


def test_linear_in_requests() -> None:
    context_lens = [(i * 7919) % 3000 if i % 3 else 0 for i in range(20_000)]

    def lines_executed(count: int) -> int:
        lines = 0

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal lines
            lines += event == "line"
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            chunks = plan_context_chunks(context_lens[:count], workspace_rows=65536, block_size=64)
        finally:
            sys.settrace(previous)
        assert sum(chunk.num_context_tokens for chunk in chunks) == sum(context_lens[:count])
        return lines

    assert lines_executed(20_000) < 11 * lines_executed(2_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"dcp_world_size": 0}, "dcp_world_size: expected at least 1, got 0"),
        ({"dcp_interleave": 0}, "dcp_interleave: expected a divisor of block_size 16, got 0"),
        ({"dcp_interleave": 3}, "dcp_interleave: expected a divisor of block_size 16, got 3"),
        ({"workspace_rows": 15}, r"workspace_rows: expected at least block_size \* dcp_world_size = 16, got 15"),
        ({"workspace_rows": 63, "dcp_world_size": 4}, r"workspace_rows: expected at least .* = 64, got 63"),
        ({"context_lens": [5, -1]}, r"context_lens\[1\]: expected at least 0, got -1"),
    ],
)
def test_refusals_name_the_argument(arguments: dict, message: str) -> None:
    valid = {"context_lens": [5], "workspace_rows": 64, "block_size": 16}
    context_lens = arguments.pop("context_lens", valid.pop("context_lens"))
    with pytest.raises(ValueError, match=message):
        plan_context_chunks(context_lens, **{**valid, **arguments})
