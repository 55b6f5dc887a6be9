"""Dual-batch overlap (A27): two builders of one layer, prepared and run in turns, from two threads, on two streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import MLA
from test_layer import Model, Step, start
from torch import Tensor

from mla_prefill.backends.base import MLAPrefillBackend
from mla_prefill.backends.native import NativePrefillBackend
from mla_prefill.backends.sdpa import SdpaPrefillBackend

ROUNDS = 200
# Of the two micro-batches; they change from round to round, so that stale metadata shows.
STEPS = [
    ([(40, 7), (0, 5), (90, 3)], [(17, 33), (0, 2)]),
    ([(0, 12)], [(130, 2), (3, 3), (0, 20)]),
    ([(64, 1), (1, 30)], [(0, 15)]),
]


class DerivedBackend(NativePrefillBackend):
    """clone() must work for classes of the user's too."""


@dataclass
class Lane:
    """One micro-batch: its builder, its steps, and what they give when nothing else runs."""

    builder: Any
    steps: list[Step]
    expected: list[Tensor]

    def build(self, round_: int) -> Any:
        return self.steps[round_ % len(self.steps)].build(self.builder)

    def differs(self, round_: int, metadata: Any) -> Tensor:
        """Whether the round's result is another than alone; on the device, nothing waits for it."""
        index = round_ % len(self.steps)
        out = self.steps[index].run(metadata)
        return (out != self.expected[index]).any()


def lanes_of(model: Model, steps: list[tuple[list, list]]) -> list[Lane]:
    lanes = []
    for lane in range(2):
        builder = model.new_builder()
        own = [start(model, requests[lane]) for requests in steps]
        lanes.append(Lane(builder, own, [step.run(step.build(builder)).clone() for step in own]))
        for step, out in zip(own, lanes[-1].expected, strict=True):
            step.check(out, passes=8)
    return lanes


@pytest.mark.parametrize("backend", [NativePrefillBackend, DerivedBackend, SdpaPrefillBackend])
def test_in_turns(backend: type[MLAPrefillBackend]) -> None:
    lanes = lanes_of(Model(workspace_rows=32, backend=backend), STEPS)
    for round_ in range(ROUNDS if backend is not SdpaPrefillBackend else 20):
        metadata = [lane.build(round_) for lane in lanes]
        assert not any(lane.differs(round_, one) for lane, one in zip(lanes, metadata, strict=True))


@pytest.mark.parametrize("backend", [NativePrefillBackend, DerivedBackend])
def test_prepared_in_one_thread_and_run_in_two(backend: type[MLAPrefillBackend]) -> None:
    lanes = lanes_of(Model(workspace_rows=32, backend=backend), STEPS)
    with ThreadPoolExecutor(2) as threads:
        for round_ in range(ROUNDS):
            metadata = [lane.build(round_) for lane in lanes]
            results = [threads.submit(lane.differs, round_, one) for lane, one in zip(lanes, metadata, strict=True)]
            assert not any(result.result() for result in results)


def test_prepared_and_run_in_two_threads() -> None:
    lanes = lanes_of(Model(workspace_rows=32), STEPS)
    assert not any(_in_threads(lanes, _rounds))


def _rounds(lane: Lane) -> Tensor:
    differing = torch.zeros((), dtype=torch.bool, device=lane.expected[0].device)
    for round_ in range(ROUNDS):
        differing |= lane.differs(round_, lane.build(round_))
    return differing


def _in_threads(lanes: list[Lane], work: Callable[[Lane], Tensor]) -> list[bool]:
    with ThreadPoolExecutor(2) as threads:
        return [bool(result.result()) for result in [threads.submit(work, lane) for lane in lanes]]


# ---- on two streams --------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_lanes() -> list[Lane]:
    """Long enough that the streams overlap."""
    steps = [
        ([(900, 700), (0, 5)], [(300, 33), (0, 900)]),
        ([(0, 12)], [(500, 300), (0, 129), (40, 20)]),
        ([(0, 64)] * 9, [(1000, 500)]),
    ]
    model = Model(
        heads=16, kv_lora=512, dims=MLA, dtype=torch.bfloat16, device="cuda", workspace_rows=512, cache_tokens=16384
    )
    lanes = lanes_of(model, steps)
    torch.cuda.synchronize()
    return lanes


@pytest.mark.gpu
def test_in_turns_on_two_streams(gpu_lanes: list[Lane]) -> None:
    streams = [torch.cuda.Stream() for _ in gpu_lanes]
    differing = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in gpu_lanes]
    torch.cuda.synchronize()
    for round_ in range(ROUNDS):
        metadata = []
        for lane, stream in zip(gpu_lanes, streams, strict=True):
            with torch.cuda.stream(stream):
                metadata.append(lane.build(round_))
        for index, (lane, stream) in enumerate(zip(gpu_lanes, streams, strict=True)):
            with torch.cuda.stream(stream):
                differing[index] |= lane.differs(round_, metadata[index])
    torch.cuda.synchronize()
    assert not any(differing)


@pytest.mark.gpu
def test_in_two_threads_on_two_streams(gpu_lanes: list[Lane]) -> None:
    def work(lane: Lane) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            differing = _rounds(lane)
        stream.synchronize()
        return differing

    assert not any(_in_threads(gpu_lanes, work))
