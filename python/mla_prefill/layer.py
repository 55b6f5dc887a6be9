"""The attention layer of an MLA model, prefill side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mla_prefill.backends import MLADimensions, MLAPrefillBackend, SplitKey, get_mla_prefill_backend
from mla_prefill.forward_context import register_layer, stage
from mla_prefill.metadata import PrefillContextChunk, PrefillMetadata
from mla_prefill.ops import gather_latent
from mla_prefill.scale import softmax_scale


class MLAAttention(torch.nn.Module):
    """Attention over new tokens and cached context, keys and values projected from the latent.

    The layer computes the softmax scale and owns it, together with the prefill backend; metadata builders clone the
    backend. Keys are never concatenated: the projection's output and ``k_pe`` go to the kernel as they are, and each
    context chunk is merged into the output by the call that computes it.

    Args:
        num_heads: query heads on this rank.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: the model's dimensions.
        kv_b_proj: maps the latent [tokens, kv_lora_rank] to [tokens, num_heads * (qk_nope_head_dim + v_head_dim)], per
            head first the key's part, then the value. A tuple's first entry counts (vLLM's linear layers).
        prefix: the layer's name in ``vllm_config.compilation_config.static_forward_context``.
        vllm_config: an ``EngineConfig`` (or vLLM's ``VllmConfig``).
        rope_scaling: the checkpoint's, for YaRN's part of the scale (see ``softmax_scale``).
        prefill_backend_cls: the backend; None: the one that ``vllm_config`` names, or the first that suits.

    Raises:
        ValueError: a layer of this name exists, rope_scaling makes no sense, or no backend suits.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: torch.nn.Module,
        prefix: str,
        vllm_config: Any,
        rope_scaling: Mapping[str, Any] | None = None,
        prefill_backend_cls: type[MLAPrefillBackend] | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.kv_b_proj = kv_b_proj
        self.scale = softmax_scale(qk_nope_head_dim + qk_rope_head_dim, rope_scaling)
        if prefill_backend_cls is None:
            prefill_backend_cls = get_mla_prefill_backend(vllm_config, mla_dimensions=MLADimensions.of(self))
        self.prefill_backend = prefill_backend_cls(
            num_heads=num_heads,
            scale=self.scale,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            vllm_config=vllm_config,
        )
        register_layer(vllm_config, prefix, self)

    @torch.no_grad()  # the ops have no gradients
    def forward(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        metadata: PrefillMetadata,
        output: Tensor | None = None,
    ) -> Tensor:
        """Runs one step: new latents into the cache, attention over the new tokens and over their cached context.

        Inputs may have more rows than the step has tokens (padding); those are not read, and not written in output.

        Args:
            q: [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], rotated.
            kv_c_normed: [tokens, kv_lora_rank], the normed latent.
            k_pe: [tokens, qk_rope_head_dim] or [tokens, 1, qk_rope_head_dim], rotated.
            kv_cache: [blocks, block_size, kv_lora_rank + qk_rope_head_dim], the latent's dtype.
            metadata: the last that a builder of this layer's cache group has built.
            output: [tokens, num_heads, v_head_dim] to write to, q's dtype.

        Returns:
            output, or a new tensor of its shape.

        Raises:
            ValueError: metadata of a step after which its builder has built another, or a tensor whose shape or dtype
                does not fit the layer and the step.
        """
        metadata.prefill_backend.expect_prepared_for(metadata)
        k_pe = k_pe.squeeze(1) if k_pe.ndim == 3 else k_pe
        self._check_inputs(q, kv_c_normed, k_pe, kv_cache, metadata, output)
        if output is None:
            output = q.new_empty((q.shape[0], self.num_heads, self.v_head_dim))
        if metadata.num_tokens == 0:
            return output
        q, kv_c_normed, k_pe, out = (
            x if x.shape[0] == metadata.num_tokens else x[: metadata.num_tokens] for x in (q, kv_c_normed, k_pe, output)
        )

        with stage("write_cache"):
            self._write_cache(kv_c_normed, k_pe, kv_cache, metadata)
        k, v = self._project(kv_c_normed, k_pe)
        lse = self._attend_new_tokens(q, k, v, out, metadata)
        del k, v  # a context chunk's projection takes their memory
        if lse is not None:
            self._attend_context(q, out, lse, kv_cache, metadata)
        return output

    def _attend_new_tokens(
        self, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor, metadata: PrefillMetadata
    ) -> Tensor | None:
        """Writes out; returns the lse where the step has context to be merged in."""
        has_context = metadata.chunked_context is not None
        with stage("attention"):
            result = metadata.prefill_backend.run_prefill_new_tokens(
                q=q, k=k, v=v, return_softmax_lse=has_context, out=out
            )
        return result[1] if has_context else None

    def _attend_context(self, q: Tensor, out: Tensor, lse: Tensor, kv_cache: Tensor, metadata: PrefillMetadata) -> None:
        """Merges each context chunk into out and lse. One chunk's latents and projection are held at a time."""
        for chunk in metadata.chunked_context.chunks:
            k, v = self._project(*self._gather(kv_cache, chunk))
            self._accumulate(chunk, q, k, v, out, lse, metadata)
            del k, v  # before the next projection, which takes their memory

    def _accumulate(
        self,
        chunk: PrefillContextChunk,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        metadata: PrefillMetadata,
    ) -> None:
        tokens = chunk.token_slice
        with stage("attention"):
            metadata.prefill_backend.accumulate_context_chunk(
                chunk=chunk, q=q[tokens], k=k, v=v, out=out[tokens], lse=lse[:, tokens]
            )

    def _write_cache(self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: PrefillMetadata) -> None:
        write = metadata.cache_write
        if write.tokens is not None:
            kv_c_normed, k_pe = kv_c_normed[write.tokens], k_pe[write.tokens]
        kv_cache[..., : self.kv_lora_rank].index_put_((write.blocks, write.offsets), kv_c_normed)
        kv_cache[..., self.kv_lora_rank :].index_put_((write.blocks, write.offsets), k_pe)

    def _gather(self, kv_cache: Tensor, chunk: PrefillContextChunk) -> tuple[Tensor, Tensor]:
        """The chunk's latent and rope part, [rows, kv_lora_rank] and [rows, qk_rope_head_dim], in the workspace."""
        with stage("gather"):
            gather_latent(kv_cache, chunk.block_table, chunk.cu_seq_lens, chunk.starts, out=chunk.latent)
        return chunk.latent.split_with_sizes([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)

    def _project(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor | SplitKey, Tensor]:
        """Key parts and value of latent rows; both are views of the projection's output."""
        with stage("projection"):
            kv = self.kv_b_proj(kv_c)
        kv = kv[0] if isinstance(kv, tuple) else kv
        features = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        if kv.shape[-1] != features:
            raise ValueError(f"kv_b_proj: expected {features} output features, got {kv.shape[-1]}")
        kv = kv.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = kv.split_with_sizes([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return (SplitKey(k_nope, k_pe) if self.qk_rope_head_dim else k_nope), v

    def _check_inputs(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        metadata: PrefillMetadata,
        output: Tensor | None,
    ) -> None:
        num_tokens, dtype = metadata.num_tokens, metadata.q_data_type

        def expect(name: str, tensor: Tensor, *width: int) -> None:
            if tuple(tensor.shape[1:]) != width or tensor.shape[0] < num_tokens:
                expected = ", ".join(map(str, (f"at least {num_tokens}", *width)))
                raise ValueError(f"{name}: expected shape [{expected}], got {list(tensor.shape)}")
            if tensor.dtype != dtype:
                raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")

        expect("q", q, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        expect("kv_c_normed", kv_c_normed, self.kv_lora_rank)
        expect("k_pe", k_pe, self.qk_rope_head_dim)
        if output is not None:
            expect("output", output, self.num_heads, self.v_head_dim)
        block = (metadata.block_size, self.kv_lora_rank + self.qk_rope_head_dim)
        if kv_cache.ndim != 3 or tuple(kv_cache.shape[1:]) != block:
            raise ValueError(f"kv_cache: expected shape [blocks, {block[0]}, {block[1]}], got {list(kv_cache.shape)}")
        if kv_cache.dtype != dtype:
            raise ValueError(f"kv_cache: expected dtype {dtype}, got {kv_cache.dtype}")
