"""Keys in two parts through vLLM's MLA layers.

vLLM's common prefill path is ``kv_b_proj``, ``_concat_k_nope_k_pe``, a run method of the backend. Here the second step
answers with a ``SplitKey``, two views and no copy, where the third is a method of this package's backend.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor

from mla_prefill.backends.base import SplitKey
from mla_prefill.backends.native import NativePrefillBackend

logger = logging.getLogger(__name__)

# The steps between the concatenation and the backend. Where an impl has its own, it may read K as a tensor.
_COMMON_PATH = ("forward_mha", "_compute_prefill_context", "_context_parallel_compute_prefill_context")
_ARGUMENTS = ("q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata")  # of the first, before others
_COMMON_MODULE = "vllm.model_executor.layers.attention.mla_attention"

# Whether the running forward_mha ends in a backend that takes SplitKey. Micro-batches run one impl from two threads.
_split: ContextVar[bool] = ContextVar("mla_prefill_split_key", default=False)


@cache
def with_split_keys(impl_class: type) -> type:
    """A vLLM impl class, its K in two parts wherever the backend of the step takes that.

    A class of its own for each impl class, derived from it alone: only then can existing objects change to it.
    """

    class SplitKeyImpl(impl_class):
        __slots__ = ()

        def forward_mha(
            self,
            q: Tensor,
            kv_c_normed: Tensor,
            k_pe: Tensor,
            kv_c_and_k_pe_cache: Tensor,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            # A later vLLM may lack any of these: then K stays a tensor.
            prefill = getattr(attn_metadata, "prefill", None)
            backend = getattr(prefill, "prefill_backend", None)
            quantized = getattr(prefill, "q_data_type", None) not in (None, q.dtype)  # vLLM then casts K, as a tensor
            is_native = isinstance(backend, NativePrefillBackend)
            if is_native:
                backend.expect_prepared_for(prefill)
            token = _split.set(is_native and not quantized)
            try:
                super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, *args, **kwargs)
            finally:
                _split.reset(token)

        def _concat_k_nope_k_pe(self, k_nope: Tensor, k_pe: Tensor) -> Tensor | SplitKey:
            if _split.get() and k_pe.shape[-1]:
                return SplitKey(k_nope, k_pe)
            return super()._concat_k_nope_k_pe(k_nope, k_pe)

    SplitKeyImpl.__name__ = SplitKeyImpl.__qualname__ = f"SplitKey{impl_class.__name__}"
    return SplitKeyImpl


def hand_over_split_keys(vllm_config: Any) -> None:
    """Changes the impl of each layer that has the native backend and vLLM's common prefill path. Twice is as once."""
    layers: Mapping[str, Any] | None = getattr(
        getattr(vllm_config, "compilation_config", None), "static_forward_context", None
    )
    if layers is None:
        logger.warning(
            "mla_prefill: expected layers in compilation_config.static_forward_context, got none: vLLM concatenates K"
        )
        return
    for layer in layers.values():
        impl = getattr(layer, "impl", None)
        if isinstance(getattr(layer, "prefill_backend", None), NativePrefillBackend) and _has_common_path(type(impl)):
            impl.__class__ = with_split_keys(type(impl))


def _has_common_path(impl_class: type) -> bool:
    steps = [getattr(impl_class, name, None) for name in (*_COMMON_PATH, "_concat_k_nope_k_pe")]
    if any(getattr(step, "__module__", None) != _COMMON_MODULE for step in steps):
        return False
    return list(inspect.signature(steps[0]).parameters)[1 : 1 + len(_ARGUMENTS)] == list(_ARGUMENTS)
