"""A layer's whole step on a GPU, from the new tokens' projection to the output: ours and vLLM's generic path, bf16."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.options import name_list
from benchmarks.paths import Generic, Ours
from benchmarks.peers_cuda import Fa3, VllmFa3
from benchmarks.steps import STEP_CASES, StepCase, StepInputs, trace_steps
from benchmarks.timer import Run, device_seconds, host_seconds

ATTENTION = {"vllm-fa3": VllmFa3("vllm-fa3", 0), "fa3": Fa3("fa3", 0)}  # both choose their KV splits, as vLLM has them
HOST_CALLS = 10
TRACE_TARGET, TARGET = 1.3, 1.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [*STEP_CASES, "trace"]
    parser.add_argument("--case", type=name_list(names), default=names, metavar="A,B", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace-rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="of the trace")
    parser.add_argument("--heads", type=int, default=16, help="of the trace's steps")
    parser.add_argument("--attention", choices=ATTENTION, help="of vLLM's path; default: the first that is installed")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there")


def run(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks step: expected a CUDA device, got none")
    paths: dict[str, Callable[[StepInputs], object]] = {Ours.name: Ours}
    attention = _attention(options.attention)
    if attention is None:
        print(f"{Generic.name}: not measured: no FlashAttention-3 here")
    else:
        print(f"{Generic.name} with {attention.name} {attention.version()}")
        paths[Generic.name] = lambda inputs: Generic(inputs, attention)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
    for name in options.case:
        row = _trace(options, paths) if name == "trace" else _measure(STEP_CASES[name], paths, options.rounds)
        report["cases"].append(row)
        print(_text(row), flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "step.json").write_text(json.dumps(report, indent=1))


def _attention(name: str | None) -> Fa3 | None:
    for peer in ATTENTION.values() if name is None else [ATTENTION[name]]:
        if peer.unavailable() is None:
            return peer
    return None


def _measure(
    case: StepCase,
    paths: dict[str, Callable[[StepInputs], object]],
    rounds: int,
    *,
    samples: int = 32,
    phases: bool = True,
) -> dict[str, object]:
    """Medians in ms. A path that fails stands in ``failed`` with its reason."""
    row: dict[str, object] = {
        "case": f"{case.name}, H={case.num_heads}",
        "target": TARGET,
        "new_tokens": case.new_tokens,
        "context_tokens": case.context_tokens,
        "failed": {},
        "error": {},
        "host_us": {},
    }
    runs: dict[str, Run] = {}
    prepared = []
    for name, path in paths.items():
        try:
            inputs = StepInputs(case)
            computed = path(inputs)
            row["error"][name] = inputs.error(computed.run(), samples)
            row["host_us"][name] = 1e6 * host_seconds(computed.run, HOST_CALLS)
            runs[name] = computed.run
            prepared.append((name, computed))
        except Exception as error:  # a peer may need what is not here
            row["failed"][name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    if phases:
        for name, computed in prepared:
            for phase, part in computed.phases().items():
                part()
                runs[f"{name}: {phase}"] = part
    host = {name: 1e-6 * row["host_us"].get(name.partition(":")[0], 0.0) for name in runs}
    row["ms"] = {name: 1e3 * statistics.median(x) for name, x in device_seconds(runs, rounds, host).items()}
    return row


def _trace(options: argparse.Namespace, paths: dict[str, Callable[[StepInputs], object]]) -> dict[str, object]:
    """The steps one after the other, each timed alone; times are summed, errors and host times are the largest."""
    rows = []
    for case in trace_steps(options.steps, options.heads):
        rows.append(_measure(case, paths, options.trace_rounds, samples=8, phases=False))
        gc.collect()
    total = {
        "case": f"{len(rows)} steps of the trace, H={options.heads}",
        "target": TRACE_TARGET,
        "new_tokens": sum(row["new_tokens"] for row in rows),
        "context_tokens": sum(row["context_tokens"] for row in rows),
        "failed": {name: reason for row in rows for name, reason in row["failed"].items()},
        "steps": rows,
    }
    names = [name for name in paths if all(name in row["ms"] for row in rows)]
    total["ms"] = {name: sum(row["ms"][name] for row in rows) for name in names}
    for key in ("error", "host_us"):
        total[key] = {name: max(row[key][name] for row in rows) for name in names}
    return total


def _text(row: dict) -> str:
    lines = [f"\n{row['case']}: {row['new_tokens']} new tokens, {row['context_tokens']} of context"]
    for name, milliseconds in row["ms"].items():
        line = f"  {name:40s} {milliseconds:9.4f} ms"
        if name in row["error"]:
            line += f"  host {row['host_us'][name]:7.1f} us  max error {row['error'][name]:.2e}"
        lines.append(line)
    lines += [f"  {name:40s} failed: {reason}" for name, reason in row["failed"].items()]
    if Ours.name in row["ms"] and Generic.name in row["ms"]:
        ratio = row["ms"][Generic.name] / row["ms"][Ours.name]
        met = "met" if ratio >= row["target"] else "not met"
        lines.append(f"  {Generic.name} / ours: {ratio:.3f} (target {row['target']:.2f}: {met})")
    return "\n".join(lines)
