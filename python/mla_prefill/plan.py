"""The work plan of ``ragged_prefill``: made once per step, reused by every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_prefill._host import expect_one_device, last_entry

__all__ = ["PrefillPlan", "WorkItem", "plan_prefill"]

_ITEMS_BEGIN = 2072  # kItemsBegin of csrc/plan/plan.h
_ITEM_INTS = 8
_MIN_TILE_Q = 64  # kMinTileQ of csrc/plan/rules.h: no backend cuts smaller query tiles


@dataclass(frozen=True)
class WorkItem:
    """Query rows ``q_begin:q_begin + q_rows`` of sequence ``seq`` against its keys ``kv_begin:kv_end``, for the heads
    ``head_begin:head_begin + head_count``; rows and keys count from the sequence's start. ``num_splits`` is 1, or, for
    few queries on a long context on a GPU, the number of pieces of the keys that thread blocks share."""

    seq: int
    q_begin: int
    q_rows: int
    kv_begin: int
    kv_end: int
    head_begin: int
    head_count: int
    num_splits: int


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """A work list for one set of lengths, on the device of its ``cu_seqlens``. A plan equals itself alone.

    ``tensor`` is int32 ``[2072 + 8 * capacity]``: a header, room for thread blocks to meet, then the items in the order
    in which they start (layout: ``csrc/plan/plan.h``). The other fields say what it was made for.
    """

    tensor: Tensor
    num_heads: int
    causal: bool
    head_dims: tuple[int, int, int]

    @property
    def num_items(self) -> int:
        """Reads the plan: waits for the device."""
        return int(self.tensor[1])

    @property
    def capacity(self) -> int:
        """Items the tensor has room for; a bound that holds for all lengths with the same batch and max_tokens_q."""
        return (self.tensor.numel() - _ITEMS_BEGIN) // _ITEM_INTS

    def items(self) -> list[WorkItem]:
        """The work list. Reads the plan: waits for the device."""
        rows = self.tensor[_ITEMS_BEGIN:].view(-1, _ITEM_INTS)[: self.num_items].tolist()
        return [WorkItem(*row) for row in rows]

    def _expect(self, q_shape: torch.Size, v_shape: torch.Size, causal: bool) -> None:
        if len(q_shape) != 3 or len(v_shape) != 3:
            return  # for the op to refuse
        nope, rope, v = self.head_dims
        made_for = (self.num_heads, self.causal, nope + rope, v)
        needed = (q_shape[1], causal, q_shape[2], v_shape[2])
        if made_for != needed:
            raise ValueError(
                "plan: expected one made for (num_heads, causal, qk_head_dim, v_head_dim) = "
                f"{needed}, got one made for {made_for}"
            )


def plan_prefill(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    num_heads: int,
    causal: bool,
    head_dims: tuple[int, int, int] = (128, 64, 128),
    dtype: torch.dtype = torch.bfloat16,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    max_tokens_q: int | None = None,
) -> PrefillPlan:
    """Plans the work of ``ragged_prefill`` for these lengths: longest first, heads grouped to share the cache.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, ascending, as for ``ragged_prefill``.
        num_heads: heads of q, k and v.
        causal: as for ``ragged_prefill``.
        head_dims: ``(qk_nope_head_dim, qk_rope_head_dim, v_head_dim)``.
        dtype: of q, k and v.
        max_seqlen_q, max_seqlen_k: hints. No value changes a result.
        max_tokens_q: at least the number of query rows. It and the batch size alone fix the plan's size. Where it is
            None it is read from ``cu_seqlens_q`` on the host, which waits for a GPU: pass it there.

    Raises:
        RuntimeError: a wrong dtype, shape or device, or (CPU) impossible ``cu_seqlens`` or a ``max_tokens_q`` below
            the number of query rows.
    """
    del max_seqlen_q, max_seqlen_k
    if max_tokens_q is None:
        max_tokens_q = last_entry(cu_seqlens_q)
    nope, rope, v = head_dims
    tensor = torch.ops.mla_prefill.plan_prefill(
        cu_seqlens_q, cu_seqlens_k, num_heads, causal, nope, rope, v, dtype, max_tokens_q
    )
    return PrefillPlan(tensor, num_heads, causal, (nope, rope, v))


_expect_one_device = expect_one_device("plan_prefill")


@torch.library.register_fake("mla_prefill::plan_prefill")
def _plan_prefill_fake(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_heads: int,
    causal: bool,
    dim_nope: int,
    dim_rope: int,
    dim_v: int,
    dtype: torch.dtype,
    max_tokens_q: int,
) -> Tensor:
    _expect_one_device(cu_seqlens_q, cu_seqlens_k)
    sequences = torch.sym_min(cu_seqlens_q.shape[0] - 1, max_tokens_q)
    capacity = (max_tokens_q // _MIN_TILE_Q + sequences) * num_heads  # max_items of csrc/plan/rules.h
    return cu_seqlens_q.new_empty((_ITEMS_BEGIN + _ITEM_INTS * capacity,))
