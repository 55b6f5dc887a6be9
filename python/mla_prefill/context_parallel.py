"""Decode context parallelism, in which each rank caches a share of every request: what prefill needs of it.

A context chunk (``plan_context_chunks`` with ``dcp_world_size``) is gathered in three moves: each rank copies its own
rows, padded to the same number on all ranks (``gather_latent`` with ``local_starts`` and
``padded_local_cu_seq_lens``), an all-gather puts the ranks' rows one behind the other, and ``gather_latent`` again
picks them in the order of the tokens:

    mla_prefill.gather_latent(gathered.unsqueeze(1), *order, out=workspace[: chunk.num_context_tokens])

Where instead each rank attends over the rows that it has, ``merge_rank_states`` merges what they found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_prefill.backends.ragged import upload
from mla_prefill.context_chunks import ContextChunk
from mla_prefill.ops import merge_states


class RowOrder(NamedTuple):
    """All-gathered rows in the order of the tokens, as ``gather_latent`` takes it: one request in blocks of one row."""

    block_table: Tensor  # int32 [1, num_context_tokens]
    cu_seqlens: Tensor  # int32 [2]
    starts: Tensor  # int32 [1]


def dcp_row_order(chunk: ContextChunk, *, dcp_interleave: int, device: torch.device | str = "cpu") -> RowOrder:
    """Where each context token of a chunk lies among the all-gathered rows ``[world_size * padded rows, width]``.

    Made once per step, for all layers; one copy to the device, which the host does not wait for.

    Args:
        chunk: of a plan for more than one rank.
        dcp_interleave: as in the plan: token t is on rank ``t // dcp_interleave % dcp_world_size``.

    Raises:
        ValueError: a chunk of a plan for one rank.
    """
    if not chunk.local_context_lens_allranks:
        raise ValueError("chunk: expected one planned with dcp_world_size above 1, got one for a single rank")
    world_size = len(chunk.local_context_lens_allranks[0])
    lens = torch.tensor(chunk.seq_lens)
    request = torch.repeat_interleave(torch.arange(len(lens)), lens)
    # A chunk's first token is the first of a round over the ranks, so it counts from 0.
    token = torch.arange(chunk.num_context_tokens) - torch.tensor(chunk.cu_seq_lens)[request]
    rank = token // dcp_interleave % world_size
    local = token // (dcp_interleave * world_size) * dcp_interleave + token % dcp_interleave
    padded_starts = torch.tensor(chunk.padded_local_cu_seq_lens)
    rows = rank * padded_starts[-1] + padded_starts[request] + local
    bounds = torch.tensor([0, chunk.num_context_tokens])
    return RowOrder(*upload([rows.unsqueeze(0), bounds, torch.zeros(1)], torch.device(device)))


def merge_rank_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the ranks' states of the same rows over disjoint keys, rank by rank, so that all ranks get the same bits.

    Args:
        outs: ``[world_size, tokens, num_heads, v_head_dim]``, as an all-gather gives them; see ``merge_states``.
        lses: float32 ``[world_size, num_heads, tokens]``; -inf marks a rank that had no key for a row.

    Returns:
        ``(out, lse)``, new tensors.

    Raises:
        ValueError: no rank at all, or not the same number of them in both.
        RuntimeError: as ``merge_states``.
    """
    if len(outs) != len(lses) or len(outs) == 0:
        raise ValueError(f"lses: expected one for each of outs, at least one, got {len(lses)} and {len(outs)} outs")
    out, lse = outs[0].clone(), lses[0].clone()
    for other_out, other_lse in zip(outs[1:], lses[1:], strict=True):
        merge_states(out, lse, other_out, other_lse, out=out, lse=lse)
    return out, lse
