"""gather_latent and merge_states on a GPU: bytes per second against a copy that moves as many."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import mla_prefill
from benchmarks.timer import Run, device_seconds, host_seconds

WIDTH, DS_MLA_ROW = 576, 656
GATHERED_ROWS = (8192, 32768, 65536)
MERGED = ((1024, 16), (4096, 16), (8192, 16), (2048, 128), (8192, 128))  # tokens, heads
TARGET = 0.85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there")


def run(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks bandwidth: expected a CUDA device, got none")
    rows = []
    for name, make in {**_gathers(), **_merges()}.items():
        call, moved = make()
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        runs = {name: call, "copy": lambda target=target, source=source: target.copy_(source)}
        host = {key: host_seconds(one, 10) for key, one in runs.items()}
        seconds = {key: statistics.median(x) for key, x in device_seconds(runs, options.rounds, host).items()}
        share = seconds["copy"] / seconds[name]
        rows.append({"case": name, "bytes": moved, "us": 1e6 * seconds[name], "copy_us": 1e6 * seconds["copy"]})
        print(
            f"{name:44s} {1e6 * seconds[name]:8.2f} us {moved / seconds[name] / 1e12:5.2f} TB/s, copy "
            f"{1e6 * seconds['copy']:8.2f} us {moved / seconds['copy'] / 1e12:5.2f} TB/s: {share:6.1%}"
            + ("" if share >= TARGET else f"  below {TARGET:.0%}"),
            flush=True,
        )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bandwidth.json").write_text(json.dumps(rows, indent=1))


def _gathers() -> dict[str, Callable[[], tuple[Run, int]]]:
    layouts = {"plain": (torch.bfloat16, WIDTH), "fp8_e4m3": (torch.float8_e4m3fn, WIDTH)}
    layouts["fp8_ds_mla"] = (torch.uint8, DS_MLA_ROW)
    cases = [("plain", count, 64) for count in GATHERED_ROWS] + [("plain", GATHERED_ROWS[1], 1)]
    cases += [(layout, GATHERED_ROWS[1], 64) for layout in ("fp8_e4m3", "fp8_ds_mla")]

    def make(layout: str, rows: int, block_size: int) -> tuple[Run, int]:
        """Eight requests that start amid a block."""
        dtype, width = layouts[layout]
        blocks = rows // block_size + 8
        raw = torch.randint(256, (blocks, block_size, width * dtype.itemsize), dtype=torch.uint8, device="cuda")
        cache = raw.view(dtype)
        table = torch.randperm(blocks, dtype=torch.int32, device="cuda").view(8, -1)
        bounds = torch.arange(9, dtype=torch.int32, device="cuda") * (rows // 8)
        starts = torch.full((8,), block_size // 2, dtype=torch.int32, device="cuda")
        out = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
        scale = torch.ones(1, device="cuda") if layout == "fp8_e4m3" else None
        moved = rows * (width * dtype.itemsize + 2 * WIDTH)
        options = {"out": out, "k_scale": scale, "layout": layout}
        return lambda: mla_prefill.gather_latent(cache, table, bounds, starts, **options), moved

    return {
        f"gather {layout}, {rows} rows, block {block_size}": lambda case=(layout, rows, block_size): make(*case)
        for layout, rows, block_size in cases
    }


def _merges() -> dict[str, Callable[[], tuple[Run, int]]]:
    def make(tokens: int, heads: int) -> tuple[Run, int]:
        a, b, out = (torch.randn(tokens, heads, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        lse_a, lse_b, lse = (torch.randn(heads, tokens, device="cuda") for _ in range(3))
        moved = 3 * tokens * heads * (2 * 128 + 4)
        return lambda: mla_prefill.merge_states(a, lse_a, b, lse_b, out=out, lse=lse), moved

    return {
        f"merge, {tokens} tokens x {heads} heads": lambda case=(tokens, heads): make(*case) for tokens, heads in MERGED
    }
