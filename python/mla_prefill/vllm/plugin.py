"""The plugin: what vLLM runs in each of its processes before it picks a backend."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger(__name__)

BACKEND = "mla_prefill.vllm.backend.NativeMLAPrefillBackend"

# What vLLM chooses where nothing is configured, and the class that takes the place of each.
DEFAULTS = {
    "FLASH_ATTN": "mla_prefill.vllm.auto.InsteadOfFlashAttn",
    "ROCM_AITER_FA": "mla_prefill.vllm.auto.InsteadOfRocmAiterFA",
    "CPU": "mla_prefill.vllm.auto.InsteadOfCPU",
}


def register() -> None:
    """Registers the native backend as ``CUSTOM``; with ``MLA_PREFILL_VLLM=auto`` also in place of vLLM's defaults.

    ``CUSTOM`` and not a name of its own: a name made at run time can be neither parsed nor unpickled in a process that
    has not run the plugin yet, and ``EngineArgs`` parses the configuration before plugins are loaded.

    Raises:
        ValueError: ``MLA_PREFILL_VLLM`` is something else than "auto", "custom" or empty.
    """
    mode = os.environ.get("MLA_PREFILL_VLLM") or "custom"
    if mode not in ("auto", "custom"):
        raise ValueError(f"MLA_PREFILL_VLLM: expected auto or custom, got {mode!r}")
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

    custom = MLAPrefillBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning("mla_prefill: CUSTOM is %s already and stays so", custom.get_path())
    else:
        register_mla_prefill_backend(custom, BACKEND)
    if mode == "auto":
        for name, path in DEFAULTS.items():
            if name in MLAPrefillBackendEnum.__members__:  # the CPU's came with vLLM 0.30
                register_mla_prefill_backend(MLAPrefillBackendEnum[name], path)
        _forget_choices()


def _forget_choices() -> None:
    """vLLM caches what it chose, maybe before the plugin ran."""
    selector = sys.modules.get("vllm.v1.attention.backends.mla.prefill.selector")
    cached = getattr(selector, "_auto_select_mla_prefill_backend", None)
    if cached is not None:
        cached.cache_clear()
