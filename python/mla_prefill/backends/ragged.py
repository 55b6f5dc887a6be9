"""What all backends of this package do alike: a step becomes ragged batches, and each run is one of them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mla_prefill.backends.base import MLAPrefillBackend, SplitKey


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """The sequences of one attention call: a step's new tokens, or its queries against a context chunk."""

    cu_seqlens_q: Tensor  # int32 [sequences + 1], from 0, on the layers' device
    cu_seqlens_k: Tensor
    max_seqlen_q: int  # upper bounds
    max_seqlen_k: int
    causal: bool
    # Lengths of the sequences, int32 on the host. vLLM up to 0.27 keeps those of the queries on the device alone.
    q_lens: Tensor | None
    k_lens: Tensor | None

    @cached_property
    def num_tokens_q(self) -> int | None:
        return None if self.q_lens is None else int(self.q_lens.sum())

    @cached_property
    def num_tokens_k(self) -> int | None:
        return None if self.k_lens is None else int(self.k_lens.sum())


class RaggedPrefillBackend(MLAPrefillBackend):
    """A backend that computes one ``RaggedBatch`` at a time."""

    _new_tokens: RaggedBatch
    _chunks: list[RaggedBatch]  # of the prepared step, in order

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        self._new_tokens = _new_tokens_of(prefill_metadata)
        self._chunks = _chunks_of(prefill_metadata)

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if output_scale is not None:
            name = self.get_name()
            raise ValueError(f"output_scale: expected None ({name} does not quantise its output), got a tensor")
        self._expect_prepared()
        self._check_tensors(self._new_tokens, q, k, v, out)
        result, lse = self._attend(self._new_tokens, q, k, v, return_softmax_lse, out)
        return (result, lse) if return_softmax_lse else result

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: Tensor | None = None,
        k: Tensor | SplitKey | None = None,
        v: Tensor | None = None,
        out: Tensor | None = None,
        *,
        chunk_idx: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        batch = self._batch_of(chunk, chunk_idx)
        self._check_tensors(batch, q, k, v, out)
        return self._attend(batch, q, k, v, True, out)

    @abstractmethod
    def _attend(
        self, batch: RaggedBatch, q: Tensor, k: Tensor | SplitKey, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One batch of the prepared step; the tensors are checked."""

    def _expect_prepared(self) -> None:
        if self._prefill_metadata is None:
            raise ValueError("prefill_metadata: expected prepare_metadata before the layers run, got none")

    def _batch_of(self, chunk: Any, chunk_idx: int | None) -> RaggedBatch:
        self._expect_prepared()
        if (chunk is None) == (chunk_idx is None):
            raise ValueError(f"chunk: expected either chunk or chunk_idx, got {'none' if chunk is None else 'both'}")
        if chunk is not None:
            context = self._prefill_metadata.chunked_context
            chunk_idx = chunk.index
            if context is None or chunk_idx >= len(context.chunks) or context.chunks[chunk_idx] is not chunk:
                raise ValueError(
                    f"chunk: expected one of the prepared step's {len(self._chunks)} context chunks, "
                    f"got chunk {chunk_idx} of other metadata"
                )
        if not 0 <= chunk_idx < len(self._chunks):
            raise ValueError(f"chunk_idx: expected one of the prepared step's {len(self._chunks)}, got {chunk_idx}")
        return self._chunks[chunk_idx]

    def _check_tensors(
        self, batch: RaggedBatch, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor | None
    ) -> None:
        tokens_q, tokens_k = batch.num_tokens_q, batch.num_tokens_k
        heads, nope, rope = self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim
        dtype = getattr(self._prefill_metadata, "q_data_type", None) or q.dtype
        _expect("q", q, tokens_q, (heads, nope + rope), dtype)
        _expect("v", v, tokens_k, (heads, self.v_head_dim), dtype)
        if isinstance(k, SplitKey):
            _expect("k_nope", k.k_nope, tokens_k, (heads, nope), dtype)
            _expect("k_pe", k.k_pe, tokens_k, (rope,) if k.k_pe.ndim == 2 else (1, rope), dtype)
        else:
            _expect("k", k, tokens_k, (heads, nope + rope), dtype)
        if out is not None:
            _expect("out", out, tokens_q, (heads, self.v_head_dim), dtype)


def _expect(name: str, tensor: Tensor, rows: int | None, width: tuple[int, ...], dtype: torch.dtype) -> None:
    """Runs for each tensor of each call: one comparison where all is well."""
    if tensor.shape == (rows, *width) and tensor.dtype == dtype:
        return
    if tuple(tensor.shape[1:]) != width or rows not in (None, tensor.shape[0]):
        shape = ", ".join(map(str, ("rows" if rows is None else rows, *width)))
        raise ValueError(f"{name}: expected shape [{shape}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")


def _new_tokens_of(metadata: Any) -> RaggedBatch:
    lens = getattr(metadata, "query_lens_cpu", None)
    starts, longest = metadata.query_start_loc, metadata.max_query_len
    return RaggedBatch(starts, starts, longest, longest, True, lens, lens)


def _chunks_of(metadata: Any) -> list[RaggedBatch]:
    context = metadata.chunked_context
    if context is None:
        return []
    query_lens = getattr(metadata, "query_lens_cpu", None)
    if hasattr(context, "chunks"):
        return [
            RaggedBatch(
                chunk.query_start_loc,
                chunk.cu_seq_lens,
                chunk.max_query_len,
                chunk.max_seq_len,
                False,
                None if query_lens is None else query_lens[chunk.request_slice],
                chunk.seq_lens,
            )
            for chunk in context.chunks
        ]
    # vLLM up to 0.27: every chunk holds a part of every request, maybe an empty one.
    return [
        RaggedBatch(metadata.query_start_loc, cu_seqlens_k, metadata.max_query_len, longest, False, query_lens, lens)
        for cu_seqlens_k, longest, lens in zip(context.cu_seq_lens, context.max_seq_lens, context.seq_lens, strict=True)
    ]


def join_key(k: Tensor | SplitKey) -> Tensor:
    """Keys in one piece, ``[tokens, num_heads, qk_head_dim]``."""
    if not isinstance(k, SplitKey):
        return k
    k_nope, k_pe = k.k_nope, k.k_pe.reshape(len(k.k_pe), 1, -1)
    joined = k_nope.new_empty((*k_nope.shape[:2], k_nope.shape[2] + k_pe.shape[2]))
    joined[..., : k_nope.shape[2]] = k_nope
    joined[..., k_nope.shape[2] :] = k_pe  # broadcast by the copy: an expanded cat reads it once per head
    return joined


def upload(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors as int32 on a device: those on the host in one copy, which the host does not wait for."""
    host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    sizes = [tensor.numel() for tensor in host]
    # The caching host allocator keeps pinned memory until the copy is done.
    staging = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    for part, tensor in zip(staging.split(sizes), host, strict=True):
        part.view(tensor.shape).copy_(tensor)
    copied = iter(staging.to(device, non_blocking=True).split(sizes))
    return [
        next(copied).view(tensor.shape) if tensor.device.type == "cpu" else tensor.to(device, torch.int32)
        for tensor in tensors
    ]
