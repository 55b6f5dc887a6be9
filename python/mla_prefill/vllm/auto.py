"""The native backend in place of vLLM's defaults: native where it suits, otherwise what it stands in for.

vLLM asks the registry for a class and constructs it with a layer's dims, which the native kernel may not have. So
constructing one of these classes gives the native backend or the original, whichever is right for the layer.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from mla_prefill.backends.base import MLADimensions, MLAPrefillSelectorConfig
from mla_prefill.backends.selector import prefill_priorities
from mla_prefill.vllm.backend import NativeMLAPrefillBackend

logger = logging.getLogger(__name__)

_KEYWORDS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vllm_config")


class _InsteadOf(NativeMLAPrefillBackend):
    member: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # vLLM passes keywords; a version that does not, or has others, keeps its own backend.
        missing = [name for name in _KEYWORDS if name not in kwargs]
        reasons = [f"no {', '.join(missing)} came with the layer"] if missing else _reasons_against_native(**kwargs)
        config = kwargs.get("vllm_config")
        chosen = getattr(getattr(config, "attention_config", None), "mla_prefill_backend", None)
        if getattr(chosen, "name", None) == cls.member:
            reasons.append(f"{cls.member} is configured")
        if reasons:
            _warn_once(cls.member, "; ".join(reasons))
            return cls.original()(*args, **kwargs)
        return NativeMLAPrefillBackend(*args, **kwargs)

    @classmethod
    def original(cls) -> type[MLAPrefillBackend]:
        module, _, name = MLAPrefillBackendEnum[cls.member].value.rpartition(".")
        return getattr(import_module(module), name)

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        native = super().validate_configuration(device_capability, selector_config)
        return native and cls.original().validate_configuration(device_capability, selector_config)


class InsteadOfFlashAttn(_InsteadOf):
    member = "FLASH_ATTN"


class InsteadOfRocmAiterFA(_InsteadOf):
    member = "ROCM_AITER_FA"


class InsteadOfCPU(_InsteadOf):
    member = "CPU"


def _reasons_against_native(
    qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int, vllm_config: Any, **others: Any
) -> list[str]:
    from vllm.platforms import current_platform

    dims = MLADimensions(qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim)
    dtype = getattr(getattr(vllm_config, "model_config", None), "dtype", None)
    capability = None if current_platform.is_cpu() else current_platform.get_device_capability()
    reasons = NativeMLAPrefillBackend.validate_configuration(capability, MLAPrefillSelectorConfig(dtype, dims))
    if not reasons and prefill_priorities(capability, dims)[0].name != "NATIVE":
        reasons = ["only its portable kernel would serve, behind libraries with one for this GPU"]
    return reasons


@cache
def _warn_once(member: str, reasons: str) -> None:
    logger.warning("mla_prefill: leaves layers to %s: %s", member, reasons)
