"""The pieces of decode context parallelism, all ranks in one process: local gather, reorder, merge."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from helpers import INF, NAN, assert_matches_oracle, assert_same_bits, int32, make_inputs, skip_without_kernel

import mla_prefill
from mla_prefill import dcp_row_order, merge_rank_states, plan_context_chunks

BLOCK_SIZE = 16
WIDTH = 576
INTERLEAVES = pytest.mark.parametrize("interleave", [1, 16])
CONTEXTS = [230, 0, 5, 64, 700, 1, 129]


@pytest.fixture
def device(device: str) -> str:
    skip_without_kernel("gather_latent", device)
    return device


def tokens_of(rank: int, world_size: int, interleave: int, tokens: int) -> torch.Tensor:
    """By the definition: token t is on rank t // interleave % world_size."""
    return torch.tensor([t for t in range(tokens) if t // interleave % world_size == rank], dtype=torch.int64)


def caches_of(latents: list[torch.Tensor], world_size: int, interleave: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each rank's paged cache, NaN where it holds nothing, and the block table, which is the same on all ranks."""
    blocks = [-(-len(latent) // (BLOCK_SIZE * world_size)) for latent in latents]
    order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0))
    table = torch.full((len(latents), max(blocks)), -1, dtype=torch.int32)
    for row, ids in zip(table, order.split(blocks), strict=True):
        row[: len(ids)] = ids
    caches = [torch.full((sum(blocks), BLOCK_SIZE, WIDTH), NAN, dtype=latents[0].dtype) for _ in range(world_size)]
    for rank, cache in enumerate(caches):
        for latent, row in zip(latents, table, strict=True):
            own = latent[tokens_of(rank, world_size, interleave, len(latent))]
            for index, rows in enumerate(own.split(BLOCK_SIZE) if len(own) else ()):
                cache[int(row[index]), : len(rows)] = rows
    return caches, table


@INTERLEAVES
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("workspace_rows", [64, 256, 4096])
def test_gathered_rows_come_in_the_order_of_the_tokens(
    workspace_rows: int, world_size: int, interleave: int, device: str
) -> None:
    latents = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)).bfloat16() for n in CONTEXTS]
    caches, table = caches_of(latents, world_size, interleave)
    caches, table = [cache.to(device) for cache in caches], table.to(device)
    chunks = plan_context_chunks(
        CONTEXTS,
        workspace_rows=workspace_rows,
        block_size=BLOCK_SIZE,
        dcp_world_size=world_size,
        dcp_interleave=interleave,
    )
    assert len(chunks) > 4 or workspace_rows > 64
    for chunk in chunks:
        padded = chunk.padded_local_cu_seq_lens
        own = [
            mla_prefill.gather_latent(
                cache, table[chunk.request_slice], int32(padded, device), int32(chunk.local_starts, device)
            )
            for cache in caches
        ]
        assert all(rows.shape == (padded[-1], WIDTH) for rows in own)
        gathered = torch.cat(own)  # what an all-gather gives
        order = dcp_row_order(chunk, dcp_interleave=interleave, device=device)
        rows = torch.full((workspace_rows, WIDTH), NAN, dtype=torch.bfloat16, device=device)
        mla_prefill.gather_latent(gathered.unsqueeze(1), *order, out=rows[: chunk.num_context_tokens])
        requests = zip(latents[chunk.request_slice], chunk.starts, chunk.seq_lens, strict=True)
        expected = torch.cat([latent[start : start + length] for latent, start, length in requests])
        assert_same_bits(rows[: chunk.num_context_tokens].cpu(), expected)


@INTERLEAVES
def test_the_real_order_by_example(interleave: int) -> None:
    """Four ranks, 70 tokens: rows of the all-gathered tensor, worked out by hand."""
    (chunk,) = plan_context_chunks([70], workspace_rows=512, block_size=16, dcp_world_size=4, dcp_interleave=interleave)
    rows = dcp_row_order(chunk, dcp_interleave=interleave).block_table[0].tolist()
    if interleave == 1:  # 18 rows on each rank, two of them padding on ranks 2 and 3
        assert rows[:6] == [0, 18, 36, 54, 1, 19] and rows[-2:] == [17, 35]
    else:  # 32 rows on each rank: a whole unit, then 6 rows of rank 0's second one
        assert rows[:17] == [*range(16), 32] and rows[63] == 96 + 15 and rows[64:] == [16, 17, 18, 19, 20, 21]


def test_a_chunk_for_one_rank_has_no_order() -> None:
    (chunk,) = plan_context_chunks([70], workspace_rows=512, block_size=16)
    with pytest.raises(ValueError, match="chunk: expected one planned with dcp_world_size above 1"):
        dcp_row_order(chunk, dcp_interleave=1)


@INTERLEAVES
@pytest.mark.parametrize("world_size", [1, 4])
def test_states_of_the_ranks_merge_into_one_pass(
    world_size: int, interleave: int, dtype: torch.dtype, device: str
) -> None:
    """Each rank attends over its own keys; of the short sequence some ranks have none."""
    inputs = make_inputs(Case("dcp", (9, 3, 20), (200, 2, 77), 3, False), dtype, device, layout="projection")
    states = []
    for rank in range(world_size):
        own = [
            keys.start + tokens_of(rank, world_size, interleave, keys.stop - keys.start) for _, keys in inputs.bounds()
        ]
        index = torch.cat(own).to(device)
        bounds = int32([0, *torch.tensor([len(x) for x in own]).cumsum(0).tolist()], device)
        part = inputs.map_tensors(lambda x, index=index: x[index], "k", "v", "k_pe")
        kwargs = {**part.kwargs(), "cu_seqlens_k": bounds}
        states.append(mla_prefill.ragged_prefill(**kwargs, return_lse=True))
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    before = outs.clone(), lses.clone()
    assert torch.isneginf(lses).any() == (world_size == 4)
    assert_matches_oracle(inputs, *merge_rank_states(outs, lses), passes=2 * world_size)
    assert_same_bits(outs, before[0])
    assert_same_bits(lses, before[1])


def test_states_of_different_ranks_are_refused() -> None:
    for outs, lses in ((2, 3), (0, 0)):
        with pytest.raises(
            ValueError, match=f"lses: expected one for each of outs, at least one, got {lses} and {outs}"
        ):
            merge_rank_states(torch.zeros(outs, 5, 2, 8), torch.full((lses, 2, 5), INF))
