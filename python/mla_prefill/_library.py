"""Loads the op libraries: importing this module registers ``torch.ops.mla_prefill.*``.

``_ops*.so`` holds the schemas and the CPU kernels, ``_cuda_ops*.so`` the CUDA kernels and ``_hip_ops*.so`` those for
AMD GPUs, where they were built and torch has CUDA or ROCm. They use torch's stable ABI and hold no Python, so one build
serves every interpreter and torch >= 2.11.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch

_FOLDER = Path(__file__).resolve().parent


def _load(stem: str, *, required: bool) -> None:
    found = sorted(_FOLDER.glob(f"{stem}*.so"))
    if not found and not required:
        return
    if len(found) != 1:
        names = [path.name for path in found]
        raise ImportError(
            f"mla_prefill: expected one op library {stem}*.so in {_FOLDER}, got {names}; install the package"
        )
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        raise _unloadable(found[0], str(error.__cause__ or error)) from error


def _is_cut_off(library: Path) -> bool:
    """Whether an ELF file ends before its segments do. The loader would map them all the same, and the process die of
    SIGBUS in the first page that is not there."""
    with library.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return False  # the loader refuses it with its own words
        (table,), (entry_size, entries) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        file.seek(table)
        segments = file.read(entry_size * entries)
    if len(segments) < entry_size * entries:
        return True
    places = (struct.unpack_from("<8xQ16xQ", segments, at) for at in range(0, len(segments), entry_size))
    return library.stat().st_size < max(offset + size for offset, size in places)


def _unloadable(library: Path, reason: str) -> ImportError:
    if "undefined symbol" in reason or "GLIBC" in reason:
        advice = "it was built for other libraries than are here: build the package on this machine"
    else:
        advice = "install the package again"
    return ImportError(
        f"mla_prefill: expected {library.name} to load under torch {torch.__version__}, got: {reason}; {advice}"
    )


if torch.__version__ < "2.11.0a0":
    raise ImportError(f"mla_prefill: expected torch >= 2.11, got torch {torch.__version__}")
for _library in _FOLDER.glob("_*.so"):
    if _is_cut_off(_library):
        raise _unloadable(_library, "a file that ends before its last segment does")
_load("_ops", required=True)
if torch.version.cuda is not None:
    _load("_cuda_ops", required=False)
if torch.version.hip is not None:
    _load("_hip_ops", required=False)
