"""What one step's layers share: lengths, cache places, context chunks, workspace, and the prepared backend."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_prefill.backends.base import MLAPrefillBackend
from mla_prefill.backends.ragged import upload
from mla_prefill.context_chunks import ContextChunk, plan_context_chunks

logger = logging.getLogger(__name__)

# Enough for one round over most steps' context; 72 MiB of 576 bfloat16 values. A cap of its own: sized by the longest
# sequence, the workspace and the projection of its rows would take gigabytes.
DEFAULT_WORKSPACE_ROWS = 65536


@dataclass(frozen=True)
class PrefillContextChunk:
    """A ``ContextChunk`` with its query side and its tensors (int32, on the layers' device). vLLM's names."""

    index: int
    request_slice: slice
    token_slice: slice  # the step's tokens that belong to these requests
    is_continuation: bool
    num_context_tokens: int
    query_start_loc: Tensor  # [num_requests + 1], from 0
    max_query_len: int
    starts: Tensor  # [num_requests]
    cu_seq_lens: Tensor  # [num_requests + 1]
    seq_lens: Tensor  # [num_requests], on the CPU
    max_seq_len: int
    block_table: Tensor  # [num_requests, max_blocks]
    latent: Tensor  # [num_context_tokens, kv_lora_rank + qk_rope_head_dim], its rows of the workspace


@dataclass(frozen=True)
class ChunkedContext:
    workspace: Tensor  # [rows, kv_lora_rank + qk_rope_head_dim]
    chunks: list[PrefillContextChunk]


@dataclass(frozen=True)
class CacheWrite:
    """Where the step's latents go."""

    tokens: Tensor | None  # int64, the tokens that have a slot; None: all of them
    blocks: Tensor  # int64, the cache block of each of these tokens
    offsets: Tensor  # int64, the row in the block


@dataclass(frozen=True)
class PrefillMetadata:
    """One step of prefill. Token t of request b is row ``query_start_loc[b] + t`` of the layers' inputs."""

    num_requests: int
    num_tokens: int
    query_lens_cpu: Tensor  # int32 [num_requests], on the CPU
    query_start_loc: Tensor  # int32 [num_requests + 1]
    max_query_len: int
    block_size: int
    block_table: Tensor  # int32 [num_requests, max_blocks]
    cache_write: CacheWrite
    chunked_context: ChunkedContext | None  # None: no request of the step has context
    q_data_type: torch.dtype
    prefill_backend: MLAPrefillBackend


class MLAMetadataBuilder:
    """Builds the metadata of each step for the layers of one cache group. One builder per micro-batch.

    It owns a clone of the layers' prefill backend and the workspace that context is gathered into, so builders don't
    touch each other's state. Everything on the host goes to the device in one copy from pinned memory, which the host
    does not wait for.

    Args:
        layer_names: names of the layers, registered in ``vllm_config``; the first one's backend is cloned.
        vllm_config: an ``EngineConfig`` (or vLLM's ``VllmConfig``).
        block_size: tokens per block of the latent cache.
        dtype: of the layers' inputs and of the workspace.
        device: where the layers run.
        workspace_rows: context rows gathered at once, rounded up to whole blocks. The projection of a chunk, rows *
            heads * (qk_nope_head_dim + v_head_dim) values, is what it really costs.

    Raises:
        ValueError: no layer names, a name that is not registered, or a size below 1.
    """

    def __init__(
        self,
        layer_names: Sequence[str],
        vllm_config: Any,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        workspace_rows: int = DEFAULT_WORKSPACE_ROWS,
    ) -> None:
        for name, value in (("block_size", block_size), ("workspace_rows", workspace_rows)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        layers = vllm_config.compilation_config.static_forward_context
        missing = [name for name in layer_names if name not in layers]
        if missing or not layer_names:
            raise ValueError(f"layer_names: expected names among {list(layers)}, got {list(layer_names)}")
        self.prefill_backend: MLAPrefillBackend = layers[layer_names[0]].prefill_backend.clone()
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        rows = -(-workspace_rows // block_size) * block_size
        width = self.prefill_backend.kv_lora_rank + self.prefill_backend.qk_rope_head_dim
        logger.info(
            "context workspace: %d rows of %d %s, %.1f MiB", rows, width, dtype, rows * width * dtype.itemsize / 2**20
        )
        self.workspace = torch.empty((rows, width), dtype=dtype, device=self.device)

    def build(
        self,
        query_lens: Sequence[int] | Tensor,
        seq_lens: Sequence[int] | Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
    ) -> PrefillMetadata:
        """Plans a step and prepares the backend for it, which from then on refuses the steps built before.

        Args:
            query_lens: new tokens of each request, on the host.
            seq_lens: new tokens and cached context of each request, on the host.
            block_table: integers [num_requests, max_blocks], the cache blocks of each request in order. On the host
                or on the device.
            slot_mapping: integers [tokens], ``block * block_size + row`` of each new token; negative: not cached.
                On the host, or a GPU is waited for.

        Raises:
            ValueError: lengths or shapes that contradict each other.
        """
        query_lens_cpu = torch.as_tensor(query_lens, dtype=torch.int32, device="cpu")
        seq_lens_cpu = torch.as_tensor(seq_lens, dtype=torch.int32, device="cpu")
        if query_lens_cpu.ndim != 1 or query_lens_cpu.shape != seq_lens_cpu.shape:
            raise ValueError(
                "seq_lens: expected one entry for each of query_lens, "
                f"got shapes {tuple(seq_lens_cpu.shape)} and {tuple(query_lens_cpu.shape)}"
            )
        context_lens = (seq_lens_cpu - query_lens_cpu).tolist()
        for request, (query_len, context_len) in enumerate(zip(query_lens_cpu.tolist(), context_lens, strict=True)):
            if query_len < 0:
                raise ValueError(f"query_lens[{request}]: expected at least 0, got {query_len}")
            if context_len < 0:
                raise ValueError(
                    f"seq_lens[{request}]: expected at least the {query_len} new tokens, got {query_len + context_len}"
                )
        num_requests, num_tokens = len(context_lens), int(query_lens_cpu.sum())
        if block_table.ndim != 2 or block_table.shape[0] != num_requests:
            raise ValueError(f"block_table: expected [{num_requests}, max_blocks], got {list(block_table.shape)}")
        if max(context_lens, default=0) > block_table.shape[1] * self.block_size:
            raise ValueError(
                f"block_table: expected room for {max(context_lens)} context tokens, "
                f"got {block_table.shape[1]} blocks of {self.block_size}"
            )
        if slot_mapping.shape != (num_tokens,):
            raise ValueError(f"slot_mapping: expected [{num_tokens}], got {list(slot_mapping.shape)}")

        # A request without new tokens has no rows to attend from, so its context is not worth a gather.
        needed = [context if query else 0 for query, context in zip(query_lens_cpu.tolist(), context_lens, strict=True)]
        plan = plan_context_chunks(needed, workspace_rows=self.workspace.shape[0], block_size=self.block_size)
        bounds = torch.zeros(num_requests + 1, dtype=torch.int32)
        bounds[1:] = query_lens_cpu.cumsum(0)
        slots = slot_mapping.long()
        cached = (slots >= 0).nonzero().squeeze(1)
        slots = slots[cached]
        query_start_loc, block_table, blocks, offsets, cached, *chunk_tensors = upload(
            [
                bounds,
                block_table,
                slots // self.block_size,
                slots % self.block_size,
                cached,
                *(tensor for chunk in plan for tensor in _tensors_of(chunk, bounds)),
            ],
            self.device,
        )
        tokens = None if len(cached) == num_tokens else cached.long()
        chunks = [
            _on_device(chunk, bounds, block_table, self.workspace, *chunk_tensors[3 * chunk.index :][:3])
            for chunk in plan
        ]
        metadata = PrefillMetadata(
            num_requests=num_requests,
            num_tokens=num_tokens,
            query_lens_cpu=query_lens_cpu,
            query_start_loc=query_start_loc,
            max_query_len=int(query_lens_cpu.max()) if num_requests else 0,
            block_size=self.block_size,
            block_table=block_table,
            cache_write=CacheWrite(tokens, blocks.long(), offsets.long()),
            chunked_context=ChunkedContext(self.workspace, chunks) if chunks else None,
            q_data_type=self.dtype,
            prefill_backend=self.prefill_backend,
        )
        self.prefill_backend.prepare_metadata(metadata)
        return metadata


def _tensors_of(chunk: ContextChunk, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What ``_on_device`` wants of a chunk on the device."""
    own = _own_bounds(chunk, bounds)
    return own - own[0], torch.tensor(chunk.starts), torch.tensor(chunk.cu_seq_lens)


def _on_device(
    chunk: ContextChunk,
    bounds: Tensor,
    block_table: Tensor,
    workspace: Tensor,
    query_start_loc: Tensor,
    starts: Tensor,
    cu_seq_lens: Tensor,
) -> PrefillContextChunk:
    own = _own_bounds(chunk, bounds)
    return PrefillContextChunk(
        index=chunk.index,
        request_slice=chunk.request_slice,
        token_slice=slice(int(own[0]), int(own[-1])),
        is_continuation=chunk.is_continuation,
        num_context_tokens=chunk.num_context_tokens,
        query_start_loc=query_start_loc,
        max_query_len=int(own.diff().max()),
        starts=starts,
        cu_seq_lens=cu_seq_lens,
        seq_lens=torch.tensor(chunk.seq_lens, dtype=torch.int32),
        max_seq_len=chunk.max_seq_len,
        block_table=block_table[chunk.request_slice],
        latent=workspace[: chunk.num_context_tokens],
    )


def _own_bounds(chunk: ContextChunk, bounds: Tensor) -> Tensor:
    return bounds[chunk.request_slice.start : chunk.request_slice.stop + 1]
