"""The device planner as compiled for waves of 64 lanes, against the host planner, bit by bit."""

from __future__ import annotations

import pytest
import torch
from cases import MLA
from helpers import cu_seqlens
from kernels import ITEMS_BEGIN, PLAN_CONFIGS, PLAN_VERSION, code_object, plan_prefill

from mla_prefill._C import plan_items

pytestmark = pytest.mark.usefixtures("toolchain")


@pytest.mark.parametrize("backend", ["hip", "sm90"])
@pytest.mark.parametrize(
    ("arch", "sequences", "num_heads", "causal", "chunk_size", "capacity"),
    [
        ("gfx942", 90, 3, True, None, None),
        ("gfx90a", 7, 20, False, None, None),
        ("gfx950", 0, 2, True, None, None),
        ("gfx942", 513, 1, True, 256, None),
        ("gfx90a", 600, 1, False, 512, None),
        ("gfx950", 70, 3, True, None, 20),
    ],
)
def test_agrees_with_the_host(
    arch: str, sequences: int, num_heads: int, causal: bool, chunk_size: int | None, capacity: int | None, backend: str
) -> None:
    """With room for more items than there are, or a list that is cut off."""
    generator = torch.Generator().manual_seed(sequences)
    lens_q = torch.randint(0, 300, (sequences,), generator=generator) * (
        torch.rand(sequences, generator=generator) > 0.2
    )
    lens_k = torch.randint(0, 40, (sequences,), generator=generator) ** 2
    lens_k[::5] *= 50  # what sm90 splits
    bounds_q, bounds_k = cu_seqlens(lens_q.tolist(), start=3), cu_seqlens(lens_k.tolist(), start=1)
    items = plan_items(bounds_q.tolist(), bounds_k.tolist(), num_heads, causal, *MLA, backend)
    capacity = len(items) + 5 if capacity is None else capacity
    got = plan_prefill(
        code_object("plan", arch),
        bounds_q,
        bounds_k,
        num_heads=num_heads,
        causal=causal,
        capacity=capacity,
        backend=backend,
        chunk_size=chunk_size,
    )
    listed = got[ITEMS_BEGIN:].reshape(capacity, 8)
    items = items[:capacity]
    assert [tuple(item) for item in listed[: len(items)].tolist()] == items
    assert (listed[len(items) :] == 0).all()

    config = PLAN_CONFIGS[backend]
    long_items = sum(int(lens_k[seq]) > config.short_keys for seq, *_ in items)
    split_end = [sum(splits >= pieces for *_, splits in items) for pieces in (16, 8, 4, 2)]
    assert got[:6].tolist() == [PLAN_VERSION, len(items), capacity, sequences, num_heads, causal]
    assert got[6:13].tolist() == [config.tile_q, config.tile_kv, long_items, *split_end]
    assert not got[13:ITEMS_BEGIN].any()
