"""FLASH_ATTN: FlashAttention 2, 3 or 4, whichever is installed and made for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_prefill.backends.adapter import AdapterBackend, LiveBatch, load
from mla_prefill.backends.base import Capability, MLADimensions, device_capability
from mla_prefill.backends.selector import selector_config_of

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Library:
    """One distribution of ``flash_attn_varlen_func``. All return an lse of [heads, tokens], natural log."""

    distribution: str
    module: str
    capability_majors: tuple[int, ...]
    lse_keyword: str
    dtypes: tuple[torch.dtype, ...] = _HALF
    amd: bool = False
    pads_v: bool = False  # v must be as wide as q and k
    options: tuple[tuple[str, Any], ...] = ()

    def suits(self, capability: Capability) -> bool:
        if capability is None:
            return False
        return self.amd if torch.version.hip is not None else capability[0] in self.capability_majors


# In the order of preference. One KV split, so that a result does not depend on the load; FA2 has no other here.
_ONE_SPLIT = (("num_splits", 1),)
_LIBRARIES = (
    _Library("flash-attn-3", "flash_attn_interface", (9,), "return_attn_probs", options=_ONE_SPLIT),
    _Library("fa3-fwd", "fa3_fwd_interface", (9,), "return_attn_probs", (torch.bfloat16,), options=_ONE_SPLIT),
    _Library("flash-attn-4", "flash_attn.cute", (9, 10, 11), "return_lse", options=_ONE_SPLIT),
    _Library("flash-attn", "flash_attn", (8, 9, 10, 12), "return_attn_probs", amd=True, pads_v=True),
)


class FlashAttnPrefillBackend(AdapterBackend):
    """FLASH_ATTN. Pads V, and slices the output, for FlashAttention-2 alone."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = _HALF
    supported_mla_dimensions: ClassVar[tuple[MLADimensions, ...]] = tuple(
        MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
        for nope, rope, v in ((128, 64, 128), (192, 64, 256), (64, 64, 128), (256, 0, 256))
    )
    compute_capabilities: ClassVar[str] = "8.0 to 12.x, or an AMD GPU"

    def _set_up(self) -> None:
        dtype = selector_config_of(self.vllm_config).dtype
        self._library, self._attention, reason = _choose(device_capability(), dtype)
        if self._attention is None:
            raise ImportError(f"FLASH_ATTN: {self.missing_dependency() or reason}")

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def supports_compute_capability(cls, device_capability: Capability) -> bool:
        return any(library.suits(device_capability) for library in _LIBRARIES)

    @classmethod
    def missing_dependency(cls) -> str | None:
        return _first(_LIBRARIES)[2] or None

    @classmethod
    def validate_configuration(cls, device_capability: Capability, selector_config: Any) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        if not reasons:
            _, function, reason = _choose(device_capability, selector_config.dtype)
            if function is None:
                reasons.append(reason)
        return reasons

    def _run(
        self, batch: LiveBatch, prepared: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self._library.pads_v:
            v = pad(v, (0, q.shape[-1] - v.shape[-1]))
        result = self._attention(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=batch.cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            softmax_scale=self.scale,
            causal=batch.causal,
            **{self._library.lse_keyword: return_lse},
            **dict(self._library.options),
        )
        result = result if isinstance(result, tuple) else (result, None)
        return result[0], result[1] if return_lse else None


def _choose(
    capability: Capability, dtype: torch.dtype | None
) -> tuple[_Library | None, Callable[..., Any] | None, str]:
    """The first library that suits and loads, with its function, or why there is none."""
    suitable = [
        library for library in _LIBRARIES if library.suits(capability) and (dtype is None or dtype in library.dtypes)
    ]
    if not suitable:
        return None, None, f"expected a GPU and a dtype that a FlashAttention has, got {capability} and {dtype}"
    return _first(suitable)


def _first(libraries: Sequence[_Library]) -> tuple[_Library | None, Callable[..., Any] | None, str]:
    problems = []
    for library in libraries:
        function, problem = load(library.module, "flash_attn_varlen_func")
        if function is not None:
            return library, function, ""
        problems += [problem] if problem else []
    names = " or ".join(library.distribution for library in libraries)
    return None, None, f"package: expected {names}, got {'; '.join(problems) or 'none'}"
