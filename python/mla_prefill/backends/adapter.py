"""What adapters over other libraries share: their calls see only sequences that have both queries and keys."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mla_prefill.backends.base import SplitKey
from mla_prefill.backends.ragged import RaggedBatch, RaggedPrefillBackend, join_key, upload


def load(module: str, name: str) -> tuple[Any, str]:
    """What a library calls so, or None and what is wrong with the library: nothing where it isn't installed."""
    try:
        return getattr(importlib.import_module(module), name), ""
    except Exception as error:  # a broken library is as good as none, whatever it raises
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            return None, ""
        return None, f"{module}: {type(error).__name__}: {error}"


@dataclass(frozen=True, eq=False)
class LiveBatch:
    """A ``RaggedBatch`` without its empty sequences.

    Libraries answer an empty key set with NaN, with a finite lse, with +inf, by a hang or by refusing, so they never
    get one. Sequences without queries go too.
    """

    cu_seqlens_q: Tensor  # int32 [sequences + 1], on the layers' device
    cu_seqlens_k: Tensor
    q_lens: Tensor  # int32 [sequences], on the host
    k_lens: Tensor
    causal: bool
    rows_q: Tensor | None  # int64, on the device: the query rows of these sequences; None: all rows
    rows_k: Tensor | None

    @property
    def num_sequences(self) -> int:
        return len(self.q_lens)

    @cached_property
    def max_seqlen_q(self) -> int:
        return int(self.q_lens.max())

    @cached_property
    def max_seqlen_k(self) -> int:
        return int(self.k_lens.max())


class AdapterBackend(RaggedPrefillBackend):
    """A backend over a library's variable-length attention."""

    _calls: dict[RaggedBatch, tuple[LiveBatch, Any]]  # of the prepared step

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        self._calls = {}
        for index, batch in enumerate((self._new_tokens, *self._chunks)):
            live = _live(batch)
            prepared = self._prepare(index, live, prefill_metadata.q_data_type) if live.num_sequences else None
            self._calls[batch] = (live, prepared)

    def _prepare(self, index: int, batch: LiveBatch, dtype: torch.dtype) -> Any:
        """Once per step: what the library wants to know before the call ``index`` of the step."""
        return None

    @abstractmethod
    def _run(
        self, batch: LiveBatch, prepared: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The library's call.

        Args:
            batch: never empty.
            prepared: what ``_prepare`` returned.
            q, k, v: the rows of the batch, k in one piece, v strided.
            return_lse: whether the lse will be read.
            out: contiguous, may be written and returned instead of a new tensor.

        Returns:
            The output, v_head_dim wide or wider, and the lse as the contract has it, natural log and [heads, tokens].
        """

    def _attend(
        self, batch: RaggedBatch, q: Tensor, k: Tensor | SplitKey, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        live, prepared = self._calls[batch]
        if not live.num_sequences or live.rows_q is not None:
            out = q.new_empty((*q.shape[:2], self.v_head_dim)) if out is None else out
            out.zero_()
            lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32) if return_lse else None
            if live.num_sequences:
                live_out, live_lse = self._run_rows(live, prepared, q, k, v, return_lse, None)
                out.index_copy_(0, live.rows_q, live_out)
                if return_lse:
                    lse.index_copy_(1, live.rows_q, live_lse)
            return out, lse
        target = out if out is not None and out.is_contiguous() else None
        result, lse = self._run_rows(live, prepared, q, k, v, return_lse, target)
        if out is None:
            return result, lse
        if result.data_ptr() != out.data_ptr():
            out.copy_(result)
        return out, lse

    def _run_rows(
        self,
        batch: LiveBatch,
        prepared: Any,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        return_lse: bool,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        k = join_key(k)
        if batch.rows_q is not None:
            q = q[batch.rows_q]
        if batch.rows_k is not None:
            k, v = k[batch.rows_k], v[batch.rows_k]
        result, lse = self._run(batch, prepared, q, k, v, return_lse, out)
        if return_lse and lse.shape != (self.num_heads, q.shape[0]):
            raise RuntimeError(
                f"{self.get_name()}: expected an lse of shape {[self.num_heads, q.shape[0]]}, got {list(lse.shape)}: "
                "this version of the library is not supported"
            )
        return result[..., : self.v_head_dim], lse


def _live(batch: RaggedBatch) -> LiveBatch:
    q_lens, k_lens = (
        # Where no host copy came with the metadata: waits, once per step.
        bounds.diff().cpu() if lens is None else lens
        for lens, bounds in ((batch.q_lens, batch.cu_seqlens_q), (batch.k_lens, batch.cu_seqlens_k))
    )
    live = (q_lens > 0) & (k_lens > 0)
    if live.all():
        return LiveBatch(batch.cu_seqlens_q, batch.cu_seqlens_k, q_lens, k_lens, batch.causal, None, None)

    vectors = [_bounds(q_lens[live]), _bounds(k_lens[live])]
    lost_rows = [bool((lens[~live] > 0).any()) for lens in (q_lens, k_lens)]
    for lens, lost in zip((q_lens, k_lens), lost_rows, strict=True):
        if lost:
            vectors.append(live.repeat_interleave(lens).nonzero().flatten())
    cu_seqlens_q, cu_seqlens_k, *rows = upload(vectors, batch.cu_seqlens_q.device)
    rows_q = rows.pop(0).long() if lost_rows[0] else None
    rows_k = rows.pop(0).long() if lost_rows[1] else None
    return LiveBatch(cu_seqlens_q, cu_seqlens_k, q_lens[live], k_lens[live], batch.causal, rows_q, rows_k)


def _bounds(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0))
