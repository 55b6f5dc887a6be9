"""The plugin: what vLLM runs in each of its processes before it picks a backend."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from importlib import import_module

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS = "0.25 to 0.33"

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

    Beside a vLLM without the interface that this package knows it registers nothing and says so in one warning: vLLM
    calls it unguarded in every process, whatever the model.

    Raises:
        ValueError: ``MLA_PREFILL_VLLM`` is something else than "auto", "custom" or empty.
    """
    mode = os.environ.get("MLA_PREFILL_VLLM") or "custom"
    if mode not in ("auto", "custom"):
        raise ValueError(f"MLA_PREFILL_VLLM: expected auto or custom, got {mode!r}")
    try:
        _register(instead_of_defaults=mode == "auto")
    except Exception as error:  # whatever another version's interface answers with
        logger.warning(
            "mla_prefill: expected the MLA prefill backends of vLLM %s, got vLLM %s (%s: %s): nothing is registered",
            SUPPORTED_VERSIONS,
            _installed_version(),
            type(error).__name__,
            error,
        )


def _register(*, instead_of_defaults: bool) -> None:
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

    paths = {MLAPrefillBackendEnum.CUSTOM: BACKEND}
    if instead_of_defaults:
        known = MLAPrefillBackendEnum.__members__  # the CPU's came with vLLM 0.30
        paths |= {known[name]: path for name, path in DEFAULTS.items() if name in known}
    # All that could fail comes before the first registration.
    MLAPrefillBackend.clone  # noqa: B018  (builders of a version without it share one backend)
    for path in paths.values():
        module, _, name = path.rpartition(".")
        getattr(import_module(module), name)
    custom = MLAPrefillBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        logger.warning("mla_prefill: CUSTOM is %s already and stays so", custom.get_path())
        del paths[custom]
    for member, path in paths.items():
        register_mla_prefill_backend(member, path)
    if instead_of_defaults:
        _forget_choices()


def _installed_version() -> str:
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def _forget_choices() -> None:
    """vLLM caches what it chose, maybe before the plugin ran."""
    selector = sys.modules.get("vllm.v1.attention.backends.mla.prefill.selector")
    cached = getattr(selector, "_auto_select_mla_prefill_backend", None)
    if cached is not None:
        cached.cache_clear()
