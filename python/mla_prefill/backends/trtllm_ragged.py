"""TRTLLM_RAGGED: TensorRT-LLM's ragged kernels for Blackwell, out of FlashInfer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_prefill.backends.adapter import AdapterBackend, LiveBatch, load
from mla_prefill.backends.base import Capability, MLADimensions, is_nvidia
from mla_prefill.backends.flashinfer import WORKSPACE_BYTES, missing_flashinfer, natural_heads_first

_FUNCTION = ("flashinfer.prefill", "trtllm_ragged_attention_deepseek")


class TrtllmRaggedPrefillBackend(AdapterBackend):
    """TRTLLM_RAGGED. Its lse is base 2 and [tokens, heads], q must be packed, V goes in as it is."""

    supported_mla_dimensions: ClassVar[tuple[MLADimensions, ...]] = (
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        MLADimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    )
    compute_capabilities: ClassVar[str] = "10.x"

    def _set_up(self) -> None:
        if reason := self.missing_dependency():
            raise ImportError(f"TRTLLM_RAGGED: {reason}")
        self._workspace: Tensor | None = None

    @staticmethod
    def get_name() -> str:
        return "TRTLLM_RAGGED"

    @classmethod
    def supports_compute_capability(cls, device_capability: Capability) -> bool:
        return is_nvidia(device_capability) and device_capability[0] == 10

    @classmethod
    def missing_dependency(cls) -> str | None:
        return missing_flashinfer(*_FUNCTION)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        if self._workspace is None:
            # The kernels count in it, from zero.
            self._workspace = torch.zeros(
                WORKSPACE_BYTES, dtype=torch.uint8, device=prefill_metadata.query_start_loc.device
            )
        super().prepare_metadata(prefill_metadata)

    def _prepare(self, index: int, batch: LiveBatch, dtype: torch.dtype) -> Tensor:
        return batch.cu_seqlens_k.diff()

    def _run(
        self, batch: LiveBatch, prepared: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        attention, _ = load(*_FUNCTION)
        result = attention(
            query=q.contiguous(),
            key=k,
            value=v,
            workspace_buffer=self._workspace,
            seq_lens=prepared,
            max_q_len=batch.max_seqlen_q,
            max_kv_len=batch.max_seqlen_k,
            bmm1_scale=self.scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=batch.num_sequences,
            window_left=-1,
            cum_seq_lens_q=batch.cu_seqlens_q,
            cum_seq_lens_kv=batch.cu_seqlens_k,
            enable_pdl=False,
            is_causal=batch.causal,
            return_lse=return_lse,
            out=out,
        )
        return natural_heads_first(result) if return_lse else (result, None)
