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
        "kernels": module.kernel_table() if module else [],
    }


def _compiled_module() -> tuple[ModuleType | None, str | None]:
    try:
        return import_module("mla_prefill._C"), None
    except ImportError as error:
        return None, f"expected the compiled module mla_prefill._C, got {error}"


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
