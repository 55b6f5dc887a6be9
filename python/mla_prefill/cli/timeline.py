"""The measured schedule of a batch: what the Hopper kernel ran when, from the stamps that it leaves in the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from mla_prefill.cli.work_list import HEAD_DIMS, Schedule, ScheduledTicket, Ticket, bounds_of, kernel_here
from mla_prefill.ops import ragged_prefill
from mla_prefill.plan import PrefillPlan, plan_prefill
from mla_prefill.scale import softmax_scale

_TIMELINE = 17  # of the plan's header, see csrc/plan/plan.h; so are stamps and their order
_STAMP_INTS = 4  # worker, SM, and nanoseconds in two
_LONG_LANES, _SHORT_LANES = 1, 2  # teams of a thread block
_WARM_UP_RUNS = 10  # the last of them fills the L2 and finds the clock up


@dataclass(frozen=True)
class CostFit:
    """Time of one head of an item: ``overhead + per_tile * key tiles``, in µs."""

    overhead: float
    per_tile: float


def measure(modelled: Schedule, seed: int = 0) -> Schedule:
    """Runs the batch with random bfloat16 inputs on the current GPU; times are in µs from the first stamp.

    A stamp is the producer's, which is about one key tile ahead of the products; the end is that of the last products.

    Raises:
        ValueError: not the sm90 kernel on its GPU, a batch without query rows, or one too large for the GPU's memory.
    """
    here = kernel_here()
    if modelled.kernel != "sm90" or here != "sm90":
        raise ValueError(
            f"measure: expected the sm90 kernel on a GPU that runs it, got {modelled.kernel!r} where {here!r} would run"
        )
    if not modelled.tickets:
        raise ValueError("measure: expected a batch with query rows, got none")
    tickets = [entry.ticket for entry in modelled.tickets]
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    try:
        inputs = random_inputs(modelled, seed)
        plan = plan_prefill(
            inputs["cu_seqlens_q"],
            inputs["cu_seqlens_k"],
            num_heads=modelled.heads,
            causal=modelled.causal,
            head_dims=HEAD_DIMS,
            max_tokens_q=inputs["q"].shape[0],
        )
        if plan.num_items != modelled.num_items:
            raise ValueError(f"measure: expected a plan of {modelled.num_items} items, got {plan.num_items}")
        plan, stamps = with_timeline(plan, tickets, sms)
        for _ in range(_WARM_UP_RUNS):
            ragged_prefill(**inputs, plan=plan)
        stamps.zero_()
        ragged_prefill(**inputs, plan=plan)
        recorded = stamps.cpu()
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"lengths: expected a batch that fits the GPU's memory, got {error}") from error
    return replace(modelled, workers=sms, tickets=read_timeline(recorded, tickets, sms), unit="µs")


def random_inputs(schedule: Schedule, seed: int = 0) -> dict[str, Tensor | float | bool]:
    """Arguments of ``ragged_prefill`` on the current GPU: k and v slices of one tensor, k_pe apart, as in a layer."""
    bounds = bounds_of(schedule.lengths)
    nope, rope, v = HEAD_DIMS
    rows, keys = (side[-1] for side in bounds)
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    k, values = normal(keys, schedule.heads, nope + v).split([nope, v], dim=-1)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(side, dtype=torch.int32, device="cuda") for side in bounds)
    return {
        "q": normal(rows, schedule.heads, nope + rope),
        "k": k,
        "v": values,
        "k_pe": normal(keys, rope),
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "scale": softmax_scale(nope + rope),
        "causal": schedule.causal,
    }


def with_timeline(plan: PrefillPlan, tickets: list[Ticket], sms: int) -> tuple[PrefillPlan, Tensor]:
    """The plan with room for a timeline behind its items, and that room: int32 ``[stamps, 4]``."""
    begin = plan.tensor.numel()
    num_stamps = len(tickets) + (_LONG_LANES + _SHORT_LANES) * sms
    tensor = torch.cat([plan.tensor, plan.tensor.new_zeros(_STAMP_INTS * num_stamps)])
    tensor[_TIMELINE] = begin
    return replace(plan, tensor=tensor), tensor[begin:].view(-1, _STAMP_INTS)


def read_timeline(stamps: Tensor, tickets: list[Ticket], sms: int) -> list[ScheduledTicket]:
    """What ran when, in µs. A worker's ticket ends where its next one starts, the last one at the worker's end.

    Args:
        stamps: int32 ``[stamps, 4]`` on the CPU: those of the long tickets, of the ``sms`` workers' ends, of the short
            tickets, of the ends of their ``2 * sms`` workers.
        tickets: in the order of the plan.

    Raises:
        ValueError: a stamp is missing, or a worker's times run backwards.
    """
    num_long = sum(not ticket.is_short for ticket in tickets)
    sizes = [num_long, _LONG_LANES * sms]
    if num_long < len(tickets):
        sizes += [len(tickets) - num_long, _SHORT_LANES * sms]
    used = stamps[: sum(sizes)]
    workers, sm_ids, times = (
        used[:, 0].tolist(),
        used[:, 1].tolist(),
        used.contiguous().view(torch.int64)[:, 1].tolist(),
    )
    if 0 in times:
        raise ValueError(
            f"measure: expected {len(times):,} stamps of the kernel in the plan, got {len(times) - times.count(0):,}"
        )
    origin = min(times)
    rows = {sm: row for row, sm in enumerate(sorted(set(sm_ids)))}
    scheduled = []
    first = 0
    for lanes, begin in zip((_LONG_LANES, _SHORT_LANES), (0, sizes[0] + sizes[1]), strict=True):
        count = len(tickets) - first if lanes == _SHORT_LANES else num_long
        end_of = {worker: times[begin + count + worker] for worker in range(lanes * sms)} if count else {}
        backwards = []  # from the last ticket, so that each finds where its worker's next one starts
        for index in reversed(range(count)):
            worker, start = workers[begin + index], times[begin + index]
            end, end_of[worker] = end_of[worker], start
            if end < start:
                raise ValueError(f"measure: expected times that increase, got {end} after {start} on worker {worker}")
            backwards.append(
                ScheduledTicket(
                    tickets[first + index],
                    rows[sm_ids[begin + index]],
                    (start - origin) / 1000,
                    (end - start) / 1000,
                    worker % lanes,
                    lanes,
                )
            )
        scheduled += reversed(backwards)
        first += count
    return scheduled


def fit_cost(measured: Schedule) -> CostFit | None:
    """Least squares over the long tickets; None where they are all of the same number of key tiles."""
    entries = [entry for entry in measured.tickets if entry.ticket.tiles and not entry.ticket.is_short]
    if len({entry.ticket.tiles for entry in entries}) < 2:
        return None
    heads = torch.tensor([entry.ticket.item.head_count for entry in entries], dtype=torch.float64)
    tiles = torch.tensor([entry.ticket.tiles for entry in entries], dtype=torch.float64)
    times = torch.tensor([entry.cost for entry in entries], dtype=torch.float64)
    overhead, per_tile = torch.linalg.lstsq(torch.stack([heads, heads * tiles], dim=1), times).solution.tolist()
    return CostFit(overhead, per_tile)


def resolution(measured: Schedule) -> float:
    """Of the GPU's clock, in ns: the smallest difference between two times."""
    times = sorted({round(1000 * time) for entry in measured.tickets for time in (entry.start, entry.end)})
    return min((later - earlier for earlier, later in pairwise(times)), default=0)
