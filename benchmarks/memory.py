"""Peak resident memory of a call, above what is there before it (Linux)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS}: expected a line {field}, got none")


def peak_mib(run: Callable[[], object]) -> float:
    """Calls ``run`` once; inputs and outputs must exist before, or they count."""
    _CLEAR_REFS.write_text("5")  # resets the high-water mark to what is resident now
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) / 1024
