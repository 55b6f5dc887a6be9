"""The schedule of a GPU's kernel, modelled, and measured from the stamps that the kernel leaves in its plan."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits, use_kernel
from torch import Tensor
from typer.testing import CliRunner

import mla_prefill
from mla_prefill.cli import app, timeline, work_list
from mla_prefill.cli.work_list import Schedule, ScheduledTicket

# Whole items, rows without keys, pieces, and short items with and without keys.
LENGTHS = [(300, 300), (700, 300), (0, 5), (64, 9000), *[(17, 40)] * 40, (5, 0), (100, 1000)]
HEADS = 3
SMS = 6


def schedule_of(kernel: str = "sm90", workers: int = SMS, **options: object) -> Schedule:
    arguments = {"lengths": LENGTHS, "heads": HEADS, "causal": True, "kernel": kernel, "workers": workers, **options}
    return work_list.make_schedule(**arguments)


def by_lane(tickets: list[ScheduledTicket]) -> dict[tuple[int, int, int], list[ScheduledTicket]]:
    lanes = defaultdict(list)
    for entry in tickets:
        lanes[entry.lanes, entry.worker, entry.lane].append(entry)
    return lanes


def assert_one_thing_at_a_time(schedule: Schedule) -> None:
    """In each lane, and the short items of an SM after its long ones."""
    for entries in by_lane(schedule.tickets).values():
        assert all(before.end <= after.start + 1e-6 for before, after in pairwise(entries))
    for worker in range(schedule.workers):
        mine = [entry for entry in schedule.tickets if entry.worker == worker]
        done = max((entry.end for entry in mine if not entry.ticket.is_short), default=0)
        assert all(entry.start >= done - 1e-6 for entry in mine if entry.ticket.is_short)


# ---- modelled --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "long_lanes", "short_lanes"), [("cpu", 1, 1), ("sm90", 1, 2), ("sm80", 2, 2), ("hip", 2, 2)]
)
def test_lanes(kernel: str, long_lanes: int, short_lanes: int) -> None:
    schedule = schedule_of(kernel)
    assert_one_thing_at_a_time(schedule)
    for entry in schedule.tickets:
        assert entry.lanes == (short_lanes if entry.ticket.is_short else long_lanes) > entry.lane >= 0
    assert schedule.makespan >= schedule.bound and 0 < schedule.balance <= 1


def test_short_items_are_those_of_short_sequences_and_the_last() -> None:
    short = [entry.ticket.is_short for entry in schedule_of().tickets]
    assert short == sorted(short) and True in short and False in short
    assert all(entry.ticket.is_short == (LENGTHS[entry.ticket.item.seq][1] <= 128) for entry in schedule_of().tickets)


@pytest.mark.parametrize(("kernel", "tile"), [("sm90", 128), ("sm80", 64)])
def test_pieces_cover_the_keys_of_their_item_in_order(kernel: str, tile: int) -> None:
    schedule = schedule_of(kernel)
    pieces = defaultdict(list)
    for entry in schedule.tickets:
        pieces[entry.ticket.item].append(entry)
    assert len(pieces) == schedule.num_items
    split = [(item, entries) for item, entries in pieces.items() if item.num_splits > 1]
    assert len(split) == HEADS
    for item, entries in split:
        assert [entry.ticket.piece for entry in entries] == list(range(item.num_splits))
        edges = [item.kv_begin, *(entry.ticket.kv_end for entry in entries)]
        assert [entry.ticket.kv_begin for entry in entries] == edges[:-1] and edges[-1] == item.kv_end
        assert all(edge % tile == 0 for edge in edges[:-1])
        assert sum(entry.ticket.tiles for entry in entries) == -(-item.kv_end // tile)
        assert max(entry.ticket.tiles for entry in entries) - min(entry.ticket.tiles for entry in entries) <= 1
        assert all(entry.cost == schedule.item_overhead + entry.ticket.tiles for entry in entries)
        assert len({entry.worker for entry in entries}) == item.num_splits  # each is scheduled on its own


def test_default_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert schedule_of("sm90", workers=None).workers == 132
    here = schedule_of(None, workers=None)
    assert (here.kernel, here.workers) == ("cpu", torch.get_num_threads())


# ---- from stamps -----------------------------------------------------------------------------------------------------

OVERHEAD, PER_TILE = 700, 350  # ns
START = 1_764_000_000 * 10**9
SM_IDS = [3, 0, 7, 1, 9, 4]  # of the thread blocks


def stamps_of(schedule: Schedule) -> Tensor:
    """What a kernel would leave that takes the schedule's tickets and OVERHEAD + PER_TILE * tiles for each head."""
    stamps, clock = [], [START + 10 * sm for sm in range(SMS)]
    for lanes in (1, 2):
        tickets = [entry.ticket for entry in schedule.tickets if entry.ticket.is_short == (lanes == 2)]
        free = [clock[worker // lanes] for worker in range(lanes * SMS)]
        for ticket in tickets:
            worker = free.index(min(free))
            stamps.append((worker, SM_IDS[worker // lanes], free[worker]))
            free[worker] += ticket.item.head_count * (OVERHEAD + PER_TILE * ticket.tiles)
        if tickets or lanes == 1:  # all workers of the long items come to an end, also without any
            stamps += [(worker, SM_IDS[worker // lanes], time) for worker, time in enumerate(free)]
        clock = free
    words = torch.tensor([(worker | sm << 32, time) for worker, sm, time in stamps], dtype=torch.int64)
    return words.view(torch.int32)


def measured_of(schedule: Schedule, stamps: Tensor) -> Schedule:
    tickets = [entry.ticket for entry in schedule.tickets]
    return replace(schedule, tickets=timeline.read_timeline(stamps, tickets, SMS), unit="µs")


LONG_ONLY = [(300, 300), (64, 9000)]
SHORT_ONLY = [(17, 40), (30, 30)]
BATCHES = pytest.mark.parametrize("lengths", [LENGTHS, LONG_ONLY, SHORT_ONLY], ids=["mixed", "long", "short"])


@BATCHES
def test_stamps_become_a_schedule(lengths: list[tuple[int, int]]) -> None:
    schedule = schedule_of(lengths=lengths)
    measured = measured_of(schedule, stamps_of(schedule))
    assert [entry.ticket for entry in measured.tickets] == [entry.ticket for entry in schedule.tickets]
    assert_one_thing_at_a_time(measured)
    for entry in measured.tickets:
        assert entry.lanes == 1 + entry.ticket.is_short
        heads = entry.ticket.item.head_count
        assert entry.cost == pytest.approx(heads * (OVERHEAD + PER_TILE * entry.ticket.tiles) / 1000)
    assert measured.tickets[0].start == 0 and measured.tickets[0].worker == sorted(SM_IDS).index(SM_IDS[0])
    assert measured.makespan >= measured.bound > 0


def test_fit_finds_what_tickets_cost() -> None:
    schedule = schedule_of()
    fit = timeline.fit_cost(measured_of(schedule, stamps_of(schedule)))
    assert fit is not None
    assert fit.overhead == pytest.approx(OVERHEAD / 1000) and fit.per_tile == pytest.approx(PER_TILE / 1000)


def test_no_fit_of_items_of_one_length() -> None:
    schedule = schedule_of(lengths=[(64, 700)] * 9, causal=False)
    assert timeline.fit_cost(measured_of(schedule, stamps_of(schedule))) is None


def test_a_missing_stamp_is_an_error() -> None:
    schedule = schedule_of()
    stamps = stamps_of(schedule)
    stamps[5] = 0
    with pytest.raises(ValueError, match=rf"measure: expected {len(stamps)} stamps .*, got {len(stamps) - 1}"):
        measured_of(schedule, stamps)


def test_times_that_run_backwards_are_an_error() -> None:
    schedule = schedule_of()
    stamps = stamps_of(schedule)
    stamps.view(torch.int64)[0, 1] += 10**9
    with pytest.raises(ValueError, match="measure: expected times that increase"):
        measured_of(schedule, stamps)


@BATCHES
def test_command_shows_both(lengths: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "measure", lambda schedule: measured_of(schedule, stamps_of(schedule)))
    text = ",".join(f"{q}:{k}" for q, k in lengths)
    picture = tmp_path / "plan.png"
    arguments = ["plan", "--lengths", text, "--heads", "3", "--kernel", "sm90", "--sms", str(SMS), "--measure"]
    result = CliRunner().invoke(app.app, [*arguments, "--out", str(picture)])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert "modelled makespan" in printed and "measured makespan" in printed and "ticks every" in printed
    if lengths is not SHORT_ONLY:
        assert "0.350 µs per key tile, 0.700 µs to start a head, 2.00 key tiles (the plan counts 2)" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [LENGTHS * 20, LONG_ONLY, SHORT_ONLY], ids=["mixed", "long", "short"])
def test_the_kernel_stamps_every_ticket(lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """read_timeline refuses a stamp that is missing and times that decrease."""
    use_kernel("sm90", monkeypatch)
    schedule = schedule_of(lengths=lengths, workers=None)
    measured = timeline.measure(schedule)
    assert measured.workers == torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    assert [entry.ticket for entry in measured.tickets] == [entry.ticket for entry in schedule.tickets]
    assert {entry.worker for entry in measured.tickets} <= set(range(measured.workers))
    assert_one_thing_at_a_time(measured)
    assert 0 < measured.bound <= measured.makespan < 1e6


@pytest.mark.gpu
def test_a_timeline_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel("sm90", monkeypatch)
    schedule = schedule_of(workers=None)
    tickets = [entry.ticket for entry in schedule.tickets]
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    inputs = timeline.random_inputs(schedule)
    plan = mla_prefill.plan_prefill(
        inputs["cu_seqlens_q"], inputs["cu_seqlens_k"], num_heads=HEADS, causal=True, max_tokens_q=len(inputs["q"])
    )
    expected = mla_prefill.ragged_prefill(**inputs, plan=plan, return_lse=True)
    untouched = plan.tensor.clone()
    with_room, stamps = timeline.with_timeline(plan, tickets, sms)
    for _ in range(3):
        before = stamps.clone()
        got = mla_prefill.ragged_prefill(**inputs, plan=with_room, return_lse=True)
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(one, other)
        assert not torch.equal(stamps, before)
    # Nothing but the stamps is left behind: the counters are back at 0, and a plan without room is never written to.
    header = with_room.tensor[: plan.tensor.numel()].clone()
    header[timeline._TIMELINE] = 0
    assert torch.equal(header, untouched)
    mla_prefill.ragged_prefill(**inputs, plan=plan)
    assert torch.equal(plan.tensor, untouched)
