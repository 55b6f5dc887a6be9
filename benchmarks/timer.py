"""The timer: alternating rounds, so that a slow moment of the machine meets all that is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]

_FLUSH_BYTES = 256 << 20  # several times the L2 of any card
_SLEEP_HZ = 2e9  # above the SM clocks of the cards measured: a sleep is never shorter than asked for
_SLEEP_SECONDS = (0.2e-3, 0.1)  # at least, at most


def cpu_seconds(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Times every run once per round.

    One untimed call of each goes first: caches, thread pools and lazy set-up stay out of the figures.
    """
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def host_seconds(run: Run, calls: int) -> float:
    """Median time in which the host enqueues one call, the queue never full. Three untimed calls go first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def device_seconds(runs: Mapping[str, Run], rounds: int, host: Mapping[str, float]) -> dict[str, list[float]]:
    """Time on the GPU of every run once per round, every second round backwards, by events around the call.

    Before each call the L2 is overwritten, then a sleep holds the queue for twice the call's ``host`` seconds, so that
    all of the call is enqueued before its first kernel starts and no host time shows.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    shortest, longest = _SLEEP_SECONDS
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        events = []
        for name in list(runs) if index % 2 == 0 else reversed(list(runs)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(int(min(max(shortest, 2 * host[name]), longest) * _SLEEP_HZ))
            begin.record()
            runs[name]()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in events:
            seconds[name].append(begin.elapsed_time(end) / 1e3)
    return seconds
