"""Prefill backends."""

from mla_prefill.backends.base import MLAPrefillBackend, SplitKey
from mla_prefill.backends.native import NativePrefillBackend

__all__ = ["MLAPrefillBackend", "NativePrefillBackend", "SplitKey"]
