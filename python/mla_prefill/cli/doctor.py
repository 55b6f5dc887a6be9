"""What is built, what is there to run on, and why each backend is or isn't usable."""

from __future__ import annotations

import os
import platform
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import mla_prefill
from mla_prefill.backends.base import device_capability
from mla_prefill.backends.selector import explain_backends, get_mla_prefill_backend, selector_config_of
from mla_prefill.forward_context import DeviceConfig, EngineConfig, ModelConfig
from mla_prefill.models import get_model

OPS = ("ragged_prefill", "plan_prefill", "merge_states", "gather_latent")


def examine(model: str | None = None, dtype: str = "bfloat16", device: str | None = None) -> dict[str, Any]:
    """A report of plain values; which backend a layer would get is answered for a model, dtype and device.

    Raises:
        ValueError: an unknown model, dtype or device.
    """
    backends = _prefill_backends(model, dtype, device)
    module, problem = _compiled_module()
    return {
        "mla_prefill": mla_prefill.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": module.build_info() if module else None,
        "build_problem": problem,
        "ops": [name for name in OPS if hasattr(torch.ops.mla_prefill, name)],
        "devices": _devices(),
        "kernels": [_with_verdict(row, module) for row in module.kernel_table()] if module else [],
        "forced_kernel": os.environ.get("MLA_PREFILL_FORCE") or None,
        **backends,
    }


def _prefill_backends(model: str | None, dtype: str, device: str | None) -> dict[str, Any]:
    shape = get_model(model) if model is not None else None
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"dtype: expected the name of a torch dtype, got {dtype!r}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    capability = device_capability(device)
    if device == "cuda" and capability is None:
        raise ValueError("device: expected cpu (no CUDA device is there), got 'cuda'")
    config = EngineConfig(
        model_config=ModelConfig(torch_dtype, shape),
        device_config=DeviceConfig("cpu" if capability is None else "cuda"),
    )
    try:
        chosen = get_mla_prefill_backend(config).get_name()
    except ValueError:
        chosen = None
    reasons = explain_backends(capability, selector_config_of(config))
    return {
        "question": {"model": model, "dtype": dtype, "device": config.device_config.device},
        "prefill_backend": chosen,
        "prefill_backends": [
            {"backend": name, "usable": not against, "reasons": against} for name, against in reasons.items()
        ],
    }


def _compiled_module() -> tuple[ModuleType | None, str | None]:
    try:
        return import_module("mla_prefill._C"), None
    except ImportError as error:
        return None, f"expected the compiled module mla_prefill._C, got {error}"


def _with_verdict(row: dict[str, Any], module: ModuleType) -> dict[str, Any]:
    """A kernel's row with ``usable`` and ``reason``, which for a GPU kernel depend on torch and the devices."""
    if "compute_capability" in row:
        toolkit, build, expected = "CUDA", torch.version.cuda, f"compute capability {row['compute_capability']}"
    elif "gcn_architectures" in row:
        toolkit, build = "ROCm", torch.version.hip
        expected = f"architecture {' or '.join(row['gcn_architectures'].split(', '))}"
    else:
        return row
    if build is None:
        reason = f"expected a {toolkit} build of torch, got {torch.__version__}"
    elif not any(_runs_on(row, properties, module) for properties in _gpus()):
        found = ", ".join(_architecture(properties) for properties in _gpus())
        reason = f"expected a device of {expected}, got {found or 'none'}"
    else:
        forced = os.environ.get("MLA_PREFILL_FORCE")
        reason = f"MLA_PREFILL_FORCE is {forced}" if forced and forced != row["backend"] else ""
    return {**row, "usable": not reason, "reason": reason}


def _runs_on(row: dict[str, Any], properties: Any, module: ModuleType) -> bool:
    if torch.version.hip is not None:
        return _architecture(properties) in row["gcn_architectures"].split(", ")
    return row["backend"] in module.cuda_kernels(properties.major, properties.minor)[0]


def _gpus() -> list[Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(index) for index in range(count)]


def _architecture(properties: Any) -> str:
    """The compute capability, or what ROCm has in its place: gfx942 and the like."""
    if torch.version.hip is not None:
        return properties.gcnArchName.partition(":")[0]
    return f"{properties.major}.{properties.minor}"


def _devices() -> list[dict[str, str]]:
    cpu = {"device": "cpu", "name": platform.processor() or platform.machine()}
    cpu["detail"] = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    devices = [cpu]
    for index, properties in enumerate(_gpus()):
        kind = _architecture(properties) if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "detail": f"{kind}, {properties.total_memory / 2**30:.0f} GiB",
            }
        )
    return devices
