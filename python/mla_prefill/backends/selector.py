"""Which backend a layer gets, and why not another."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from mla_prefill.backends.base import (
    Capability,
    MLADimensions,
    MLAPrefillBackend,
    MLAPrefillSelectorConfig,
    device_capability,
)
from mla_prefill.backends.native import HOPPER_DIMENSIONS
from mla_prefill.backends.registry import MLAPrefillBackendEnum, generation

__all__ = ["MLAPrefillSelectorConfig", "explain_backends", "get_mla_prefill_backend", "prefill_priorities"]

logger = logging.getLogger(__name__)

_Enum = MLAPrefillBackendEnum


def prefill_priorities(
    capability: Capability, mla_dimensions: MLADimensions | None = None
) -> list[MLAPrefillBackendEnum]:
    """The backends to try on a device, the best first.

    NATIVE comes first where its kernel is made for the device, and its portable kernel behind the libraries that have
    one: on Blackwell, and on Hopper for dims that its own kernel does not take.
    """
    if capability is None:
        return [_Enum.NATIVE, _Enum.SDPA]
    dims = None if mla_dimensions is None else MLADimensions.of(mla_dimensions)
    others = [_Enum.FLASH_ATTN, _Enum.FLASHINFER]
    if torch.version.hip is None and capability[0] == 10:
        others = [_Enum.FLASH_ATTN, _Enum.TRTLLM_RAGGED, _Enum.FLASHINFER]
        if dims is not None and dims.v_head_dim == 256:
            others = [_Enum.TRTLLM_RAGGED, _Enum.FLASH_ATTN, _Enum.FLASHINFER]
        return [*others, _Enum.NATIVE, _Enum.SDPA]
    if torch.version.hip is None and capability[0] == 9 and dims not in (None, *HOPPER_DIMENSIONS):
        return [*others, _Enum.NATIVE, _Enum.SDPA]
    return [_Enum.NATIVE, *others, _Enum.SDPA]


def get_mla_prefill_backend(config: Any, *, mla_dimensions: Any = None) -> type[MLAPrefillBackend]:
    """The backend class for a configuration: the one it names, or the first that suits the device.

    Args:
        config: an ``EngineConfig`` or vLLM's ``VllmConfig``. Read are ``attention_config.mla_prefill_backend`` (a
            name or a member; None: choose), ``device_config.device`` (else the current accelerator or the CPU), and
            ``model_config``'s dtype and head dims, each where it is there.
        mla_dimensions: head dims of the layer, where they may differ from the model's.

    Raises:
        ValueError: the backend named does not exist or does not suit, or none suits; with every reason.
    """
    selector_config = selector_config_of(config)
    if mla_dimensions is not None:
        selector_config = selector_config._replace(mla_dimensions=MLADimensions.of(mla_dimensions))
    capability = device_capability(_device_of(config))
    choice = getattr(getattr(config, "attention_config", None), "mla_prefill_backend", None)
    if choice is None:
        return _choose(capability, selector_config, generation())
    backend = _Enum[getattr(choice, "name", str(choice).upper())]
    if reasons := _reasons(backend, capability, selector_config):
        raise ValueError(f"mla_prefill_backend: expected one that suits, got {backend.name}: {'; '.join(reasons)}")
    _log_choice(backend.name, "as configured")
    return backend.get_class()


def explain_backends(capability: Capability, selector_config: MLAPrefillSelectorConfig) -> dict[str, list[str]]:
    """Each backend's reasons not to serve a configuration; an empty list: it can."""
    return {backend.name: _reasons(backend, capability, selector_config) for backend in _Enum}


def selector_config_of(config: Any) -> MLAPrefillSelectorConfig:
    """What a configuration says about dtype and head dims; None where it says nothing."""
    model_config = getattr(config, "model_config", None)
    if model_config is None:
        return MLAPrefillSelectorConfig()
    dims = getattr(model_config, "hf_text_config", None)
    return MLAPrefillSelectorConfig(
        getattr(model_config, "dtype", None),
        MLADimensions.of(dims) if hasattr(dims, "qk_nope_head_dim") else None,
    )


def _device_of(config: Any) -> torch.device | None:
    device = getattr(getattr(config, "device_config", None), "device", None)
    if isinstance(device, str):
        device = None if device == "auto" else torch.device(device)
    return device if isinstance(device, torch.device) else None


def _reasons(
    backend: MLAPrefillBackendEnum, capability: Capability, selector_config: MLAPrefillSelectorConfig
) -> list[str]:
    try:
        return backend.get_class().validate_configuration(capability, selector_config)
    except (ImportError, ValueError) as error:
        return [str(error)]


# ``registered`` is there to be part of the key: a choice must not outlive an override.
@cache
def _choose(
    capability: Capability, selector_config: MLAPrefillSelectorConfig, registered: int
) -> type[MLAPrefillBackend]:
    refusals = []
    for backend in prefill_priorities(capability, selector_config.mla_dimensions):
        reasons = _reasons(backend, capability, selector_config)
        if not reasons:
            why = f"; passed over: {'; '.join(refusals)}" if refusals else ""
            last_resort = backend is _Enum.SDPA and capability is not None
            _log_choice(backend.name, f"the first that suits{why}", logging.WARNING if last_resort else logging.INFO)
            return backend.get_class()
        refusals.append(f"{backend.name} ({', '.join(reasons)})")
    raise ValueError(f"mla_prefill_backend: expected one that suits, got none: {'; '.join(refusals)}")


@cache
def _log_choice(name: str, why: str, level: int = logging.INFO) -> None:
    logger.log(level, "MLA prefill backend: %s, %s", name, why)
