"""mla_prefill on the CPU against torch's SDPA, in the same run and dtype."""

from __future__ import annotations

import argparse
import json
import platform
import statistics

import torch

from benchmarks.cases import CPU_CASES, Inputs, flops
from benchmarks.memory import peak_mib
from benchmarks.options import add_common, name_list
from benchmarks.peers import CPU_PEERS, Ours
from benchmarks.timer import cpu_seconds
from tests.cases import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, CPU_CASES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", type=name_list(DTYPES), default=["fp32", "bf16"], help="default: fp32,bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}, {options.rounds} rounds, medians"
    )
    rows = []
    for name in options.case:
        for dtype_name in options.dtype:
            rows.append(_measure(CPU_CASES[name], dtype_name, options.rounds))
            print(f"{name} {dtype_name}: {rows[-1]['ratio']:.2f} x {rows[-1]['best_peer']}", flush=True)
    print("\n" + _table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "cpu.json").write_text(json.dumps(rows, indent=1))


def _measure(case: Case, dtype_name: str, rounds: int) -> dict[str, object]:
    inputs = Inputs.of(case, DTYPES[dtype_name])
    runs = {peer.name: peer.prepare(inputs) for peer in (Ours(), *CPU_PEERS)}
    seconds = {name: statistics.median(values) for name, values in cpu_seconds(runs, rounds).items()}
    best = min((peer.name for peer in CPU_PEERS), key=seconds.__getitem__)
    return {
        "case": case.name,
        "num_heads": case.num_heads,
        "dtype": dtype_name,
        "gflops": {name: flops(case) / time / 1e9 for name, time in seconds.items()},
        "best_peer": best,
        "ratio": seconds[best] / seconds["ours"],
        "peak_mib": peak_mib(case, DTYPES[dtype_name], torch.get_num_threads()),
    }


def _table(rows: list[dict[str, object]]) -> str:
    names = list(rows[0]["gflops"])
    lines = [
        "| case | dtype | " + " | ".join(f"{name} GFLOP/s" for name in names) + " | ours / best | peak MiB |",
        "|" + "---|" * (len(names) + 4),
    ]
    for row in rows:
        figures = " | ".join(f"{row['gflops'][name]:.0f}" for name in names)
        lines.append(
            f"| {row['case']}, H={row['num_heads']} | {row['dtype']} | {figures} | {row['ratio']:.2f} | "
            f"{row['peak_mib']:.1f} |"
        )
    return "\n".join(lines)
