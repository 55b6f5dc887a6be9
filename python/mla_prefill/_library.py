"""Loads the op libraries: importing this module registers ``torch.ops.mla_prefill.*``.

``_ops*.so`` holds the schemas and the CPU kernels, ``_cuda_ops*.so`` the CUDA kernels and ``_hip_ops*.so`` those for
AMD GPUs, where they were built and torch has CUDA or ROCm. They use torch's stable ABI and hold no Python, so one build
serves every interpreter and torch >= 2.11.
"""

from __future__ import annotations

from pathlib import Path

import torch


def _load(stem: str, *, required: bool) -> None:
    folder = Path(__file__).resolve().parent
    found = sorted(folder.glob(f"{stem}*.so"))
    if not found and not required:
        return
    if len(found) != 1:
        names = [path.name for path in found]
        raise ImportError(
            f"mla_prefill: expected one op library {stem}*.so in {folder}, got {names}; install the package"
        )
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(f"mla_prefill: expected torch >= 2.11, got torch {torch.__version__}: {reason}") from error


_load("_ops", required=True)
if torch.version.cuda is not None:
    _load("_cuda_ops", required=False)
if torch.version.hip is not None:
    _load("_hip_ops", required=False)
