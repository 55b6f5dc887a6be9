"""The work list of a batch and its schedule, modelled or measured, as numbers and as a picture."""

from __future__ import annotations

import heapq
import os
import re
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mla_prefill.cli.checks import expect_between, short
from mla_prefill.plan import _MIN_TILE_Q, WorkItem

KERNELS = ("cpu", "sm90", "sm80", "hip")
HEAD_DIMS = (128, 64, 128)

PICTURES = (".eps", ".jpg", ".pdf", ".png", ".svg", ".webp")

_SEQUENCES = re.compile(r"(?:(?P<count>\d{1,10})\s*[*x]\s*)?(?P<q>\d{1,10})(?:\s*:\s*(?P<kv>\d{1,10}))?")
_MAX_SEQUENCES = 100_000
_MAX_TILES = 2_000_000  # query tiles x heads, which bound the items: about a minute and 4 GB
_MAX_WORKERS = 100_000

_H200_SMS = 132
_NAMED_SEQUENCES = 10  # up to this many have a colour and a legend entry of their own
_OUTLINED_ITEMS = 500


@dataclass(frozen=True)
class Ticket:
    """What a worker takes from the list at once: an item, or a piece of one whose keys are split."""

    item: WorkItem
    piece: int  # of item.num_splits
    kv_begin: int
    kv_end: int
    tiles: int  # key tiles of each of the item's heads
    cost: int  # modelled time, in key tiles
    is_short: bool  # for the kernel's tile of short sequences


@dataclass(frozen=True)
class ScheduledTicket:
    ticket: Ticket
    worker: int  # SM or CPU thread
    start: float
    cost: float
    lane: int = 0  # of the `lanes` thread blocks or teams that share the SM
    lanes: int = 1

    @property
    def end(self) -> float:
        return self.start + self.cost


@dataclass(frozen=True)
class Schedule:
    """Tickets in the order in which they are taken. Times are in ``unit``: key tiles (modelled) or µs (measured)."""

    lengths: list[tuple[int, int]]  # (query rows, keys) of each sequence
    heads: int
    causal: bool
    kernel: str
    workers: int
    item_overhead: int  # the plan's cost of starting an item, in key tiles
    tickets: list[ScheduledTicket]
    unit: str = "key tiles"

    @property
    def num_items(self) -> int:
        return sum(entry.ticket.piece == 0 for entry in self.tickets)

    @property
    def total(self) -> float:
        """Time of whole workers: a lane is a part of one."""
        return sum(entry.cost / entry.lanes for entry in self.tickets)

    @property
    def makespan(self) -> float:
        return max((entry.end for entry in self.tickets), default=0)

    @property
    def bound(self) -> float:
        """No schedule of these tickets ends earlier: their mean per worker, or the longest one."""
        return max(self.total / self.workers, max((entry.cost for entry in self.tickets), default=0))

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
            raise ValueError(
                f"lengths: expected entries [COUNT*]Q[:KV] such as 4096, 8*512 or 64:8192, got {short(entry)}"
            )
        q, count = int(match["q"]), int(match["count"] or 1)
        if len(lengths) + count > _MAX_SEQUENCES:
            raise ValueError(
                f"lengths: expected at most {_MAX_SEQUENCES} sequences, got {len(lengths) + count} or more"
            )
        lengths += [(q, int(match["kv"] or q))] * count
    if not lengths:
        raise ValueError(f"lengths: expected at least one sequence, got {short(text)}")
    return lengths


def bounds_of(lengths: list[tuple[int, int]]) -> list[list[int]]:
    """``cu_seqlens_q`` and ``cu_seqlens_k``.

    Raises:
        ValueError: lengths beyond int32.
    """
    bounds = [list(accumulate(side, initial=0)) for side in zip(*lengths, strict=True)]
    if max(side[-1] for side in bounds) >= 2**31:
        raise ValueError("lengths: expected fewer than 2^31 rows and keys in all, got more")
    return bounds


def kernel_here() -> str:
    """The kernel that ``ragged_prefill`` takes on this machine: its GPU's where it has one, otherwise the CPU's.

    Raises:
        ValueError: the compiled module was not built.
    """
    binding = _binding()
    if not torch.cuda.is_available():
        return "cpu"
    if torch.version.hip is not None:
        return "hip" if "hip" in binding.build_info()["backends"].split(",") else "cpu"
    forced = os.environ.get("MLA_PREFILL_FORCE", "")
    return next(iter(binding.cuda_kernels(*torch.cuda.get_device_capability(), forced)[0]), "cpu")


def make_schedule(
    lengths: list[tuple[int, int]],
    *,
    heads: int,
    causal: bool,
    kernel: str | None = None,
    workers: int | None = None,
) -> Schedule:
    """Plans the batch for a kernel and plays the plan: tickets in order, each to the worker that is free first.

    An SM that two thread blocks or teams share is one worker of two lanes, each half as fast. On Hopper an SM goes on
    to the short items, in two lanes, when its long ones are done.

    Args:
        kernel: one of ``KERNELS``; ``kernel_here()`` if not given.
        workers: SMs or CPU threads; this machine's if not given, an H200's for a GPU kernel on a machine without GPU.

    Raises:
        ValueError: an unknown kernel, the compiled module was not built, lengths beyond int32, or more work or workers
            than can be scheduled.
    """
    expect_between("heads", heads, 1)
    if workers is not None:
        expect_between("sms", workers, 1, _MAX_WORKERS)
    bounds = bounds_of(lengths)
    tiles = heads * sum(-(-q // _MIN_TILE_Q) for q, _ in lengths)
    if tiles > _MAX_TILES:
        raise ValueError(
            f"lengths x heads: expected at most {_MAX_TILES:,} query tiles of {_MIN_TILE_Q} rows, got {tiles:,}"
        )
    binding = _binding()
    kernel = kernel or kernel_here()
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    if workers is None:
        workers = torch.get_num_threads() if kernel == "cpu" else gpu.multi_processor_count if gpu else _H200_SMS
    options: dict[str, Any] = {"backend": kernel}
    if kernel == "sm80" and gpu is not None and torch.version.hip is None:
        options["shared_bytes"] = gpu.shared_memory_per_block_optin
    config = binding.plan_config(**options)

    def idle(lanes: int, since: list[int]) -> list[tuple[int, int, int]]:
        return sorted((since[worker], lane, worker) for lane in range(lanes) for worker in range(workers))

    done = [0] * workers
    lanes, free = config["workers_per_sm"], idle(config["workers_per_sm"], done)
    short_began = False
    scheduled = []
    for fields in binding.plan_items(*bounds, heads, causal, *HEAD_DIMS, **options):
        item = WorkItem(*fields)
        is_short = lengths[item.seq][1] <= config["short_keys"]
        if is_short and not short_began:
            short_began = True
            lanes, free = config["short_workers_per_sm"], idle(config["short_workers_per_sm"], done)
        tiles = -(-(item.kv_end - item.kv_begin) // config["tile_kv"])
        for piece in range(item.num_splits):
            first, last = (tiles * edge // item.num_splits for edge in (piece, piece + 1))
            kv_begin = item.kv_begin + first * config["tile_kv"]
            kv_end = min(item.kv_begin + last * config["tile_kv"], item.kv_end)
            cost = item.head_count * binding.item_cost(kv_end - kv_begin, **options)
            ticket = Ticket(item, piece, kv_begin, kv_end, last - first, cost, is_short)
            start, lane, worker = heapq.heappop(free)
            heapq.heappush(free, (start + cost, lane, worker))
            done[worker] = max(done[worker], start + cost)
            scheduled.append(ScheduledTicket(ticket, worker, start, cost, lane, lanes))
    return Schedule(lengths, heads, causal, kernel, workers, config["item_overhead"], scheduled)


def _binding() -> ModuleType:
    try:
        return import_module("mla_prefill._C")
    except ImportError as error:
        raise ValueError(f"plan: expected the compiled module mla_prefill._C, got {error}") from error


# ---- the picture -----------------------------------------------------------------------------------------------------


def expect_picture(path: Path) -> None:
    """Before the work is done.

    Raises:
        ValueError: a file name whose ending is no picture format, or a file that can't be there.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"out: expected a file name that ends in {', '.join(PICTURES)}, got {str(path)!r}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"out: expected a file in a folder that exists, got {str(path)!r}")


def draw(schedule: Schedule, path: Path, measured: Schedule | None = None) -> None:
    """Writes the schedule as a picture: a bar per ticket, a row per worker, a colour per sequence; the measured one, if
    there is one, below the modelled.

    Raises:
        OSError: the file can't be written.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    sequences = list(dict.fromkeys(entry.ticket.item.seq for entry in schedule.tickets))  # in the order of first items
    named = len(sequences) <= _NAMED_SEQUENCES
    colour_map = colormaps["tab10" if named else "viridis"]
    norm = Normalize(0, 9 if named else len(sequences) - 1)
    colours = {seq: colour_map(norm(rank)) for rank, seq in enumerate(sequences)}

    panels = [schedule] if measured is None else [schedule, measured]
    height = sum(min(2.4 + 0.2 * panel.workers, 8.0) for panel in panels)
    figure = Figure(figsize=(12, height), layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        bound = _draw_panel(axes, panel, colours)
    handles = [bound]
    if named:
        for seq in sequences:
            q, kv = schedule.lengths[seq]
            handles.append(Patch(color=colours[seq], label=f"sequence {seq}: {q:,} x {kv:,}"))
    else:
        figure.colorbar(
            ScalarMappable(norm, colour_map),
            ax=list(all_axes),
            label="sequence, in the order of their first items",
            pad=0.01,
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def _draw_panel(axes: Any, schedule: Schedule, colours: dict[int, Any]) -> Any:
    """Returns the line of the bound, for the legend."""
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor("#eeeeee")  # what shows between the bars is idle time
    bars = [_bar(entry) for entry in schedule.tickets]
    axes.add_collection(
        PolyCollection(
            bars,
            facecolors=[colours[entry.ticket.item.seq] for entry in schedule.tickets],
            edgecolors="white",
            linewidths=min(0.4, _OUTLINED_ITEMS / len(bars)) if bars else 0.0,  # many bars would be all outline
        )
    )
    axes.set_xlim(0, max(schedule.makespan, schedule.bound) * 1.02 or 1)
    axes.set_ylim(schedule.workers - 0.5, -0.5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    is_modelled = schedule.unit == "key tiles"
    axes.set_xlabel("modelled time (steps of one key tile)" if is_modelled else "measured time (µs)")
    axes.set_ylabel("CPU thread" if schedule.kernel == "cpu" else "SM")
    makespan = f"{schedule.makespan:,.0f} key tiles" if is_modelled else f"{schedule.makespan:,.1f} µs"
    over = schedule.makespan / schedule.bound - 1 if schedule.bound else 0.0
    axes.set_title(
        f"{'modelled' if is_modelled else 'measured'}, {schedule.kernel}: {len(schedule.lengths):,} sequences, "
        f"{schedule.heads} heads, {'causal' if schedule.causal else 'full'}: {describe_tickets(schedule)}\n"
        f"{makespan}, {over:.1%} above the bound, {schedule.balance:.1%} busy",
        loc="left",
        fontsize=10,
    )
    return axes.axvline(schedule.bound, color="#c62828", linestyle="--", linewidth=1.2, label="lower bound")


def describe_tickets(schedule: Schedule) -> str:
    items, tickets = schedule.num_items, len(schedule.tickets)
    workers = f"{schedule.workers} {'threads' if schedule.kernel == 'cpu' else 'SMs'}"
    pieces = sum(entry.ticket.item.num_splits > 1 for entry in schedule.tickets)
    return f"{items:,} items{f' as {tickets:,} tickets ({pieces:,} pieces)' if pieces else ''} on {workers}"


def _bar(entry: ScheduledTicket) -> list[tuple[float, float]]:
    left, right = entry.start, entry.end
    top, bottom = (entry.worker - 0.5 + (entry.lane + edge) / entry.lanes for edge in (0, 1))
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
