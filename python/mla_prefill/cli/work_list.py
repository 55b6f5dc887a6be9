"""The work list of a batch and its modelled schedule, as numbers and as a picture."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from mla_prefill.plan import WorkItem

_SEQUENCES = re.compile(r"(?:(?P<count>\d+)\s*[*x]\s*)?(?P<q>\d+)(?:\s*:\s*(?P<kv>\d+))?")
_MAX_SEQUENCES = 100_000

_NAMED_SEQUENCES = 10  # up to this many have a colour and a legend entry of their own
_OUTLINED_ITEMS = 500


@dataclass(frozen=True)
class ScheduledItem:
    item: WorkItem
    worker: int
    start: int  # modelled time, in key tiles
    cost: int


@dataclass(frozen=True)
class Schedule:
    """Items in the order in which they start; each went to the worker that was free first."""

    lengths: list[tuple[int, int]]  # (query rows, keys) of each sequence
    heads: int
    causal: bool
    workers: int
    items: list[ScheduledItem]

    @property
    def total(self) -> int:
        return sum(entry.cost for entry in self.items)

    @property
    def makespan(self) -> int:
        return max((entry.start + entry.cost for entry in self.items), default=0)

    @property
    def bound(self) -> float:
        """No schedule of these items ends earlier: their mean per worker, or the longest item."""
        return max(self.total / self.workers, max((entry.cost for entry in self.items), default=0))

    @property
    def balance(self) -> float:
        """Share of the workers' time until the end that is work."""
        return self.total / (self.workers * self.makespan) if self.makespan else 1.0


def parse_lengths(text: str) -> list[tuple[int, int]]:
    """``"4096,8*512,64:8192"`` -> [(4096, 4096), (512, 512) x 8, (64, 8192)].

    Raises:
        ValueError: an entry that is not [COUNT*]Q[:KV], or more sequences than a batch may have.
    """
    lengths: list[tuple[int, int]] = []
    for entry in text.split(","):
        match = _SEQUENCES.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"lengths: expected entries [COUNT*]Q[:KV] such as 4096, 8*512 or 64:8192, got {entry!r}")
        q, count = int(match["q"]), int(match["count"] or 1)
        if len(lengths) + count > _MAX_SEQUENCES:
            raise ValueError(
                f"lengths: expected at most {_MAX_SEQUENCES} sequences, got {len(lengths) + count} or more"
            )
        lengths += [(q, int(match["kv"] or q))] * count
    return lengths


def make_schedule(
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    causal: bool,
    workers: int,
    head_dims: tuple[int, int, int] = (128, 64, 128),
) -> Schedule:
    """Plans the batch and plays the plan: items in order, each to the worker that is free first.

    Raises:
        ValueError: the module with the host planner was not built, or lengths beyond int32.
    """
    try:
        from mla_prefill import _C
    except ImportError as error:
        raise ValueError(f"plan: expected the compiled module mla_prefill._C, got {error}") from error
    cu_seqlens = [list(accumulate(side, initial=0)) for side in zip(*lengths, strict=True)]
    if max(bounds[-1] for bounds in cu_seqlens) >= 2**31:
        raise ValueError("lengths: expected fewer than 2^31 rows and keys in all, got more")
    free = [(0, worker) for worker in range(workers)]
    items = []
    for fields in _C.plan_items(*cu_seqlens, heads, causal, *head_dims):
        item = WorkItem(*fields)
        cost = item.head_count * _C.item_cost(item.kv_end - item.kv_begin)
        start, worker = heapq.heappop(free)
        heapq.heappush(free, (start + cost, worker))
        items.append(ScheduledItem(item, worker, start, cost))
    return Schedule(lengths, heads, causal, workers, items)


def draw(schedule: Schedule, path: Path) -> None:
    """Writes the schedule as a picture: a bar per item, a row per worker, a colour per sequence.

    Raises:
        ValueError: a file name whose ending is no picture format.
        OSError: the file can't be written.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    sequences = list(dict.fromkeys(entry.item.seq for entry in schedule.items))  # in the order of their first items
    named = len(sequences) <= _NAMED_SEQUENCES
    colour_map = colormaps["tab10" if named else "viridis"]
    norm = Normalize(0, 9 if named else len(sequences) - 1)
    colours = {seq: colour_map(norm(rank)) for rank, seq in enumerate(sequences)}

    figure = Figure(figsize=(12, min(2.4 + 0.2 * schedule.workers, 8.0)), layout="constrained")
    axes = figure.add_subplot(facecolor="#eeeeee")  # what shows between the bars is idle time
    bars = [_bar(entry) for entry in schedule.items]
    axes.add_collection(
        PolyCollection(
            bars,
            facecolors=[colours[entry.item.seq] for entry in schedule.items],
            edgecolors="white",
            linewidths=min(0.4, _OUTLINED_ITEMS / len(bars)) if bars else 0.0,  # many bars would be all outline
        )
    )
    axes.set_xlim(0, max(schedule.makespan, schedule.bound) * 1.02 or 1)
    axes.set_ylim(schedule.workers - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("modelled time (steps of one key tile)")
    axes.set_ylabel("worker")
    bound = axes.axvline(schedule.bound, color="#c62828", linestyle="--", linewidth=1.2, label="lower bound")
    axes.set_title(
        f"{len(schedule.lengths):,} sequences, {schedule.heads} heads, {'causal' if schedule.causal else 'full'}: "
        f"{len(bars):,} items on {schedule.workers} workers, {schedule.balance:.1%} busy",
        loc="left",
    )
    handles = [bound]
    if named:
        for seq in sequences:
            q, kv = schedule.lengths[seq]
            handles.append(Patch(color=colours[seq], label=f"sequence {seq}: {q:,} x {kv:,}"))
    else:
        figure.colorbar(
            ScalarMappable(norm, colour_map), ax=axes, label="sequence, in the order of their first items", pad=0.01
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _bar(entry: ScheduledItem) -> list[tuple[float, float]]:
    left, right = entry.start, entry.start + entry.cost
    top, bottom = entry.worker - 0.5, entry.worker + 0.5
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
