"""Which cached context rows are gathered together: the chunks of a prefill step."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class ContextChunk:
    """Context rows of a run of requests that fill the workspace once. Plain ints; the names are those of vLLM.

    Entry i of a list belongs to request ``request_slice.start + i``. A request without context inside the run has
    ``seq_lens[i] == 0``; the first and the last request of a chunk always have rows.
    """

    index: int  # position in the plan
    request_slice: slice
    starts: list[int]  # first context token of each request
    seq_lens: list[int]  # context tokens of each request
    cu_seq_lens: list[int]  # prefix sums of seq_lens, num_requests + 1 entries
    num_context_tokens: int
    max_seq_len: int
    is_continuation: bool  # the first request began in an earlier chunk

    # With decode context parallelism each rank holds a share of every request and gathers it padded to whole
    # interleave units, so that all ranks bring the same number of rows. Empty lists without it.
    local_starts: list[int] = field(default_factory=list)  # first row of each request on any rank
    padded_local_seq_lens: list[int] = field(default_factory=list)  # rows that every rank brings
    padded_local_cu_seq_lens: list[int] = field(default_factory=list)
    local_context_lens_allranks: list[list[int]] = field(default_factory=list)  # [request][rank], whole context

    @property
    def num_requests(self) -> int:
        return self.request_slice.stop - self.request_slice.start


def plan_context_chunks(
    context_lens: Sequence[int],
    *,
    workspace_rows: int,
    block_size: int,
    dcp_world_size: int = 1,
    dcp_interleave: int = 1,
) -> list[ContextChunk]:
    """Packs the cached context of a step's requests into chunks of at most ``workspace_rows`` rows.

    Requests are packed greedily in their order. One that does not fit is split at a multiple of ``block_size *
    dcp_world_size`` tokens, so that every rank starts at a cache block. Hence the chunks of a request are consecutive
    and cover [0, context_len) once, and only a chunk's first request can be a continuation. Requests without context
    take no rows, start no chunk and end none. Linear in requests plus chunks.

    Args:
        context_lens: tokens of each request that are in the cache already.
        workspace_rows: rows of the workspace that a chunk is gathered into, over all ranks and padding included.
        block_size: tokens per cache block on one rank.
        dcp_world_size: ranks that share the cache (decode context parallelism); token t is on rank
            ``t // dcp_interleave % dcp_world_size``.
        dcp_interleave: consecutive tokens on one rank; divides block_size.

    Raises:
        ValueError: a length below 0, or sizes that don't fit each other.
    """
    for name, value in (("block_size", block_size), ("dcp_world_size", dcp_world_size)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if dcp_interleave < 1 or block_size % dcp_interleave:
        raise ValueError(f"dcp_interleave: expected a divisor of block_size {block_size}, got {dcp_interleave}")
    alignment = block_size * dcp_world_size
    if workspace_rows < alignment:
        raise ValueError(
            f"workspace_rows: expected at least block_size * dcp_world_size = {alignment}, got {workspace_rows}"
        )
    shards = _Shards(dcp_world_size, dcp_interleave)
    context_lens = list(map(operator.index, context_lens))

    chunks: list[ContextChunk] = []
    begin, starts, seq_lens, room = 0, [], [], workspace_rows  # the chunk being filled

    def close() -> None:
        nonlocal starts, seq_lens, room
        while seq_lens and seq_lens[-1] == 0:
            starts.pop()
            seq_lens.pop()
        if seq_lens:
            chunks.append(_make_chunk(len(chunks), begin, starts, seq_lens, shards, context_lens))
        starts, seq_lens, room = [], [], workspace_rows

    for request, context_len in enumerate(context_lens):
        if context_len < 0:
            raise ValueError(f"context_lens[{request}]: expected at least 0, got {context_len}")
        start = 0
        while start < context_len:
            take = context_len - start
            if shards.padded_rows(take) > room:
                take = room // alignment * alignment
            if take > 0:
                if not seq_lens:
                    begin = request
                starts.append(start)
                seq_lens.append(take)
                room -= shards.padded_rows(take)
                start += take
            if start < context_len:
                close()
        if context_len == 0 and seq_lens:
            starts.append(0)
            seq_lens.append(0)
    close()
    return chunks


@dataclass(frozen=True)
class _Shards:
    """How the tokens of a request lie on the ranks: runs of ``interleave`` tokens, round robin."""

    world_size: int
    interleave: int

    def padded_local_rows(self, tokens: int) -> int:
        """Rows that each rank holds of a request's first ``tokens`` tokens, in whole interleave units."""
        return -(-tokens // (self.interleave * self.world_size)) * self.interleave

    def padded_rows(self, tokens: int) -> int:
        return self.padded_local_rows(tokens) * self.world_size if self.world_size > 1 else tokens

    def local_lens(self, tokens: int) -> list[int]:
        """Tokens that each rank holds."""
        rounds, rest = divmod(tokens, self.interleave * self.world_size)
        return [
            rounds * self.interleave + min(max(rest - rank * self.interleave, 0), self.interleave)
            for rank in range(self.world_size)
        ]


def _make_chunk(
    index: int, begin: int, starts: list[int], seq_lens: list[int], shards: _Shards, context_lens: Sequence[int]
) -> ContextChunk:
    local = {}
    if shards.world_size > 1:
        # A start is a multiple of block_size * world_size, so it has no padding and neither do the rows before it.
        padded = [shards.padded_local_rows(length) for length in seq_lens]
        local = {
            "local_starts": [start // shards.world_size for start in starts],
            "padded_local_seq_lens": padded,
            "padded_local_cu_seq_lens": list(accumulate(padded, initial=0)),
            "local_context_lens_allranks": [shards.local_lens(context_lens[begin + i]) for i in range(len(seq_lens))],
        }
    cu_seq_lens = list(accumulate(seq_lens, initial=0))
    return ContextChunk(
        index=index,
        request_slice=slice(begin, begin + len(seq_lens)),
        starts=starts,
        seq_lens=seq_lens,
        cu_seq_lens=cu_seq_lens,
        num_context_tokens=cu_seq_lens[-1],
        max_seq_len=max(seq_lens),
        is_continuation=starts[0] > 0,
        **local,
    )
