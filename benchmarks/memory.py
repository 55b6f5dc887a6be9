"""Peak resident memory of a call, above inputs and outputs (Linux)."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.cases import Inputs
from benchmarks.peers import Ours
from tests.cases import Case

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _kib(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"{_STATUS}: expected a line {field}, got none")


def _peak_of_first_call(case: Case, dtype: torch.dtype, threads: int) -> float:
    torch.set_num_threads(threads)
    run = Ours().prepare(Inputs.of(case, dtype))
    _CLEAR_REFS.write_text("5")  # resets the high-water mark to what is resident now
    before = _kib("VmRSS")
    run()
    return (_kib("VmHWM") - before) / 1024


def peak_mib(case: Case, dtype: torch.dtype, threads: int) -> float:
    """The first call in a new process, so that scratch and threads which later calls reuse count too."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(_peak_of_first_call, case, dtype, threads).result()
