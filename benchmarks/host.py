"""What a call of ragged_prefill takes the host, beside an add_ of one element on the same host."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import mla_prefill
from benchmarks.cases import Inputs
from benchmarks.timer import Run, host_seconds
from tests.cases import Case

NUM_HEADS = 16
SHORT, WITH_SCRATCH = (128,) * 8, (256,) * 16  # with 4096 keys pieces are possible, and have room to be combined in
CALLS = 50  # of one after the other; the queue is never full
TARGET_US = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there")


def run(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks host: expected a CUDA device, got none")
    one = torch.zeros(1, device="cuda")
    runs: dict[str, Run] = {"add_ of one element": lambda: one.add_(1)}
    for lengths in (SHORT, WITH_SCRATCH):
        runs |= _calls(lengths)
    rounds = [{name: 1e6 * host_seconds(call, CALLS) for name, call in runs.items()} for _ in range(options.rounds)]
    figures = {}
    for name in runs:
        # The ratio is taken round by round: a host may change its speed from one to the next.
        ratio = statistics.median(figure[name] / figure["add_ of one element"] for figure in rounds)
        us = [figure[name] for figure in rounds]
        figures[name] = {"us": statistics.median(us), "us_min": min(us), "us_max": max(us), "of_add": ratio}
        print(f"{name:36s} {statistics.median(us):6.1f} us ({min(us):.1f} to {max(us):.1f}), {ratio:.2f} of add_")
    print(f"target {TARGET_US:.0f} us with plan, out and lse")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "host.json").write_text(json.dumps(figures, indent=1))


def _calls(lengths: tuple[int, ...]) -> dict[str, Run]:
    case = Case("host", lengths, lengths, NUM_HEADS, True)
    x = Inputs.of(case, torch.bfloat16, "cuda")
    bounds = (x.cu_seqlens_q, x.cu_seqlens_k)
    tokens = x.q.shape[0]
    plan = mla_prefill.plan_prefill(*bounds, num_heads=NUM_HEADS, causal=True, max_tokens_q=tokens)
    out = x.q.new_empty(tokens, NUM_HEADS, x.dim_v)
    lse = x.q.new_empty(NUM_HEADS, tokens, dtype=torch.float32)
    inputs = (x.q, x.k_nope, x.v, *bounds)
    options = {"scale": x.scale, "causal": True, "k_pe": x.k_pe}
    op = torch.ops.mla_prefill.ragged_prefill.default
    op_arguments = (x.q, x.k_nope, x.v, x.k_pe, *bounds, x.scale, True, None, None)
    op_arguments += (plan.tensor, out, lse, False, None, None, None)
    name = f"{len(lengths)} x {lengths[0]} tokens"
    return {
        f"{name}, plan, out, lse": lambda: mla_prefill.ragged_prefill(*inputs, **options, plan=plan, out=out, lse=lse),
        f"{name}, the op itself": lambda: op(*op_arguments),
        f"{name}, plan, outputs new": lambda: mla_prefill.ragged_prefill(
            *inputs, **options, plan=plan, return_lse=True
        ),
        f"{name}, no plan, out, lse": lambda: mla_prefill.ragged_prefill(*inputs, **options, out=out, lse=lse),
    }
