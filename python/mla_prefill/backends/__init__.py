"""Prefill backends."""

from mla_prefill.backends.base import MLADimensions, MLAPrefillBackend, MLAPrefillSelectorConfig, SplitKey
from mla_prefill.backends.native import NativePrefillBackend
from mla_prefill.backends.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from mla_prefill.backends.selector import get_mla_prefill_backend

__all__ = [
    "MLADimensions",
    "MLAPrefillBackend",
    "MLAPrefillBackendEnum",
    "MLAPrefillSelectorConfig",
    "NativePrefillBackend",
    "SplitKey",
    "get_mla_prefill_backend",
    "register_mla_prefill_backend",
]
