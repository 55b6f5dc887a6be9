"""What is built, what is there to run on, and why each backend is or isn't usable."""

from __future__ import annotations

import platform
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

import mla_prefill

OPS = ("ragged_prefill", "plan_prefill", "merge_states", "gather_latent")


def examine() -> dict[str, Any]:
    """A report of plain values."""
    module, problem = _compiled_module()
    return {
        "mla_prefill": mla_prefill.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "build": module.build_info() if module else None,
        "build_problem": problem,
        "ops": [name for name in OPS if hasattr(torch.ops.mla_prefill, name)],
        "devices": _devices(),
        "kernels": [_with_verdict(row) for row in module.kernel_table()] if module else [],
    }


def _compiled_module() -> tuple[ModuleType | None, str | None]:
    try:
        return import_module("mla_prefill._C"), None
    except ImportError as error:
        return None, f"expected the compiled module mla_prefill._C, got {error}"


def _with_verdict(row: dict[str, Any]) -> dict[str, Any]:
    """A kernel's row with ``usable`` and ``reason``, which for a CUDA kernel depend on torch and the devices."""
    if "compute_capability" not in row:
        return row
    needed = row["compute_capability"]
    found = [
        "{}.{}".format(*torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    if torch.version.cuda is None:
        reason = f"expected a CUDA build of torch, got {torch.__version__}"
    elif needed not in found:
        reason = f"expected a device of compute capability {needed}, got {', '.join(found) or 'none'}"
    else:
        reason = ""
    return {**row, "usable": not reason, "reason": reason}


def _devices() -> list[dict[str, str]]:
    cpu = {"device": "cpu", "name": platform.processor() or platform.machine()}
    cpu["detail"] = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    devices = [cpu]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "detail": f"sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB",
            }
        )
    return devices
