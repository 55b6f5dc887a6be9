"""``python -m benchmarks``: mla_prefill on the CPU against torch's SDPA, in the same run and dtype."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from benchmarks.cases import CASES, Inputs, flops
from benchmarks.memory import peak_mib
from benchmarks.peers import PEERS, ours
from benchmarks.timer import median_seconds

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(case, dtype_name: str, rounds: int) -> dict[str, object]:
    inputs = Inputs.of(case, DTYPES[dtype_name])
    seconds = median_seconds({"ours": ours(inputs)} | {name: peer(inputs) for name, peer in PEERS.items()}, rounds)
    best = min(PEERS, key=seconds.__getitem__)
    return {
        "case": case.name,
        "num_heads": case.num_heads,
        "dtype": dtype_name,
        "gflops": {name: flops(case) / time / 1e9 for name, time in seconds.items()},
        "best_peer": best,
        "ratio": seconds[best] / seconds["ours"],
        "peak_mib": peak_mib(case, DTYPES[dtype_name], torch.get_num_threads()),
    }


def table(rows: list[dict[str, object]]) -> str:
    names = ["ours", *PEERS]
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="default: fp32 and bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}, {options.rounds} rounds, medians"
    )
    rows = []
    for case in CASES:
        for dtype_name in options.dtype or ["fp32", "bf16"]:
            if options.case is None or case.name in options.case:
                rows.append(measure(case, dtype_name, options.rounds))
                print(f"{case.name} {dtype_name}: {rows[-1]['ratio']:.2f} x {rows[-1]['best_peer']}", flush=True)
    print("\n" + table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
