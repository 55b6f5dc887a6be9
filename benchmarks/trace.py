"""The attention calls alone of steps cut from the trace, on a GPU: ours, FlashAttention-3 and FlashInfer, bf16."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch

from benchmarks.cases import Inputs, flops
from benchmarks.options import name_list
from benchmarks.peers import Ours, Peer
from benchmarks.peers_cuda import FLASH_ATTENTION_3, FlashInfer
from benchmarks.steps import BLOCK_SIZE, StepCase, trace_steps
from benchmarks.timer import Run, device_seconds, host_seconds
from mla_prefill import plan_context_chunks
from tests.cases import Case

PEERS = {peer.name: peer for peer in (*FLASH_ATTENTION_3, FlashInfer("flashinfer", "fa3"))}
TARGET = 1.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=name_list(PEERS), default=list(PEERS), metavar="P,Q", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there")


def calls_of(step: StepCase) -> list[Case]:
    """New tokens under the causal mask, then each context chunk under none."""
    contexts, new = ([request[side] for request in step.requests] for side in (0, 1))
    chunks = plan_context_chunks(contexts, workspace_rows=step.workspace_rows, block_size=BLOCK_SIZE)
    return [
        Case("new", tuple(new), tuple(new), step.num_heads, True),
        *(
            Case("context", tuple(new[chunk.request_slice]), tuple(chunk.seq_lens), step.num_heads, False)
            for chunk in chunks
        ),
    ]


def run(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks trace: expected a CUDA device, got none")
    runners: list[Peer] = [Ours("ours", planned=True)]
    for name in options.peers:
        if reason := PEERS[name].unavailable():
            print(f"{name}: not measured: {reason.partition(chr(10))[0][:200]}")
        else:
            runners.append(PEERS[name])
    steps = [_measure(step, runners, options.rounds) for step in trace_steps(options.steps, options.heads)]
    names = [runner.name for runner in runners if all(runner.name in step["ms"] for step in steps)]
    total = {name: sum(step["ms"][name] for step in steps) for name in names}
    work = sum(step["tflop"] for step in steps)
    calls = sum(step["calls"] for step in steps)
    print(f"{len(steps)} steps, H={options.heads}: {calls} attention calls, {work:.1f} TFLOP; times summed")
    for name, milliseconds in sorted(total.items(), key=lambda item: item[1]):
        print(f"  {name:24s} {milliseconds:9.3f} ms  {work / milliseconds * 1e3:6.1f} TFLOP/s")
    for name, reason in {name: reason for step in steps for name, reason in step["failed"].items()}.items():
        print(f"  {name:24s} failed: {reason}")
    peers = [name for name in total if name != "ours"]
    if peers and "ours" in total:
        best = min(peers, key=total.__getitem__)
        print(f"  {best} / ours: {total[best] / total['ours']:.3f} (target {TARGET})")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "trace.json").write_text(json.dumps({"ms": total, "tflop": work, "steps": steps}, indent=1))


def _measure(step: StepCase, runners: list[Peer], rounds: int) -> dict[str, object]:
    """Medians of one step in ms; the calls of a runner follow each other without a flush of the L2 between them."""
    cases = calls_of(step)
    row = {"requests": step.requests, "calls": len(cases), "tflop": sum(map(flops, cases)) / 1e12, "failed": {}}
    inputs = [Inputs.of(case, torch.bfloat16, "cuda") for case in cases]
    runs: dict[str, Run] = {}
    host: dict[str, float] = {}
    for runner in runners:
        try:
            calls = [runner.prepare(one) for one in inputs]
            runs[runner.name] = lambda calls=calls: [call() for call in calls]
            host[runner.name] = host_seconds(runs[runner.name], 5)
        except Exception as error:  # a library may raise anything, and must not stop the run
            runs.pop(runner.name, None)
            row["failed"][runner.name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    row["ms"] = {name: 1e3 * statistics.median(x) for name, x in device_seconds(runs, rounds, host).items()}
    del inputs, runs
    gc.collect()
    torch.cuda.empty_cache()
    return row
