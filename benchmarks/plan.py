"""Planning by the number of sequences, and how attention over short sequences grows with it on a GPU.

Without a GPU: the CPU's planner.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import mla_prefill
from benchmarks.cases import Inputs
from benchmarks.peers import Ours
from benchmarks.timer import Run, cpu_seconds, device_seconds, host_seconds
from tests.cases import Case

BATCHES = (16, 64, 256, 1024, 2500, 10_000, 100_000)
NUM_HEADS = 16
TARGET_US = {256: 10.0, 10_000: 60.0}
SHORT = 34  # tokens of a sequence
SHORT_BATCHES, SHORT_HEADS, SHORT_TARGET = (1024, 8192), 8, 8.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there")


def run(options: argparse.Namespace) -> None:
    figures = _on_the_gpu(options.rounds) if torch.cuda.is_available() else _on_the_cpu(options.rounds)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "plan.json").write_text(json.dumps(figures, indent=1))


def _on_the_gpu(rounds: int) -> dict[str, float]:
    one = torch.zeros(1, device="cuda")
    plans: dict[str, Run] = {"add_ of one element": lambda: one.add_(1)}
    plans |= {f"{batch} sequences": _plan(batch, "cuda") for batch in BATCHES}
    short = {f"{batch} x {SHORT} tokens": _attention(batch) for batch in SHORT_BATCHES}
    figures = {}
    for runs in (plans, short):
        host = {name: host_seconds(call, 10) for name, call in runs.items()}
        figures |= {name: 1e6 * statistics.median(x) for name, x in device_seconds(runs, rounds, host).items()}
    targets = {f"{batch} sequences": target for batch, target in TARGET_US.items()}
    for name, us in figures.items():
        print(f"{name:24s} {us:8.1f} us" + (f" (target {targets[name]:.0f})" if name in targets else ""))
    few, many = (figures[name] for name in short)
    print(f"{many / few:.2f} times as long for {SHORT_BATCHES[1] // SHORT_BATCHES[0]} times the sequences, ", end="")
    print(f"target {SHORT_TARGET} or less")
    return figures


def _on_the_cpu(rounds: int) -> dict[str, float]:
    runs = {f"{batch} sequences": _plan(batch, "cpu") for batch in BATCHES}
    figures = {name: 1e6 * statistics.median(x) for name, x in cpu_seconds(runs, rounds).items()}
    for batch, (name, us) in zip(BATCHES, figures.items(), strict=True):
        print(f"{name:24s} {us:8.1f} us, {1e3 * us / batch:.0f} ns for each")
    return figures


def _plan(batch: int, device: str) -> Run:
    """1 to 199 new tokens and up to 3000 of context each."""
    generator = torch.Generator().manual_seed(1)
    new = torch.randint(1, 200, (batch,), generator=generator)
    context = torch.randint(0, 3000, (batch,), generator=generator)
    bounds = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int().to(device) for x in (new, new + context)]
    tokens = int(new.sum())
    return lambda: mla_prefill.plan_prefill(*bounds, num_heads=NUM_HEADS, causal=True, max_tokens_q=tokens)


def _attention(batch: int) -> Run:
    lengths = (SHORT,) * batch
    return Ours("ours", planned=True).prepare(
        Inputs.of(Case("short", lengths, lengths, SHORT_HEADS, True), torch.bfloat16, "cuda")
    )
