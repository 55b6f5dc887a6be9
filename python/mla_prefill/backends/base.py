"""What the layer, the metadata builder and vLLM ask of a prefill backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor

from mla_prefill.ops import merge_states


class SplitKey(NamedTuple):
    """Keys in two parts, so that the rope part, which all heads share, is never copied beside each head's own."""

    k_nope: Tensor  # [tokens, num_heads, qk_nope_head_dim]
    k_pe: Tensor  # [tokens, qk_rope_head_dim] or [tokens, 1, qk_rope_head_dim]


class MLAPrefillBackend(ABC):
    """Prefill attention of MLA over one step's batch.

    Built once per layer; ``clone()`` gives each metadata builder an instance of its own, whose ``prepare_metadata``
    runs once per step and serves all layers. The constructor must stay cheap and take exactly these seven arguments.

    Args:
        num_heads: query heads on this rank.
        scale: factor on the logits. The layer computed it; nothing here derives another one.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: the model's dimensions.
        vllm_config: a ``VllmConfig``, an ``EngineConfig``, or None where the backend needs neither.
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: Any,
    ) -> None:
        self.num_heads = num_heads
        self.scale = scale
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.vllm_config = vllm_config
        self._prefill_metadata: Any = None

    def clone(self) -> MLAPrefillBackend:
        """A new instance with the same configuration and none of the prepared state."""
        return self.__class__(
            num_heads=self.num_heads,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            vllm_config=self.vllm_config,
        )

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Called once per step, before the layers run. Everything that they share is computed here."""
        self._prefill_metadata = prefill_metadata

    @abstractmethod
    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of the step's tokens over themselves.

        Args:
            q: [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim].
            k: [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], or its two parts.
            v: [tokens, num_heads, v_head_dim], strided.
            return_softmax_lse: whether to return the pair (out, lse).
            out: [tokens, num_heads, v_head_dim] in q's dtype, written in place and returned.
            output_scale: scale of a quantised output.

        Returns:
            out, or out and lse, [num_heads, tokens] float32, the natural log of the sum of the exponentials.
        """

    @abstractmethod
    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention without a mask of a chunk's query tokens over its context rows.

        Args:
            chunk: one of the prepared metadata's context chunks.
            q, out: as above, rows of the chunk's requests only (``chunk.token_slice`` of the step's).
            k, v: as above, one row per context row of the chunk.

        Returns:
            out and lse; (0, -inf) for a request that has no rows in the chunk.
        """

    def accumulate_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Folds a chunk into the running state (out, lse) of its query tokens, in place."""
        chunk_out, chunk_lse = self.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v)
        merge_states(out, lse, chunk_out, chunk_lse, out=out, lse=lse)
