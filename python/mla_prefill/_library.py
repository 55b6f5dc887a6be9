"""Loads the op library, ``_ops*.so``: importing this module registers ``torch.ops.mla_prefill.*``.

The library uses torch's stable ABI and holds no Python, so one build serves every interpreter and torch >= 2.11.
"""

from __future__ import annotations

from pathlib import Path

import torch


def _load() -> None:
    folder = Path(__file__).resolve().parent
    found = sorted(folder.glob("_ops*.so"))
    if len(found) != 1:
        names = [path.name for path in found]
        raise ImportError(
            f"mla_prefill: expected one op library _ops*.so in {folder}, got {names}; install the package"
        )
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        reason = error.__cause__ or error
        raise ImportError(f"mla_prefill: expected torch >= 2.11, got torch {torch.__version__}: {reason}") from error


_load()
