"""The one timer: alternating rounds, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_seconds(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Times every run once per round, all of them in each round, so that a slow moment of the machine meets all.

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
    return {name: statistics.median(values) for name, values in seconds.items()}
