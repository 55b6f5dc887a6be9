"""How the commands show their results: tables for people, plain values for ``--json``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from mla_prefill.cli.console import LiteralConsole
from mla_prefill.cli.replay import ReplayReport
from mla_prefill.cli.timeline import fit_cost, resolution
from mla_prefill.cli.trace import Request
from mla_prefill.cli.work_list import Schedule, describe_tickets

STAGES = ("write_cache", "gather", "projection", "attention")


@contextmanager
def replay_progress(console: LiteralConsole, requests: list[Request]) -> Iterator[Callable[[ReplayReport], None]]:
    """A bar over the prompts' tokens, cached ones included, on a terminal."""
    if not console.is_terminal:
        yield lambda report: None
        return
    progress = Progress(
        TextColumn("replay", style="bold", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens, step {task.fields[step]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = progress.add_task("replay", total=sum(request.input_length for request in requests), step=0)

    def on_step(report: ReplayReport) -> None:
        progress.update(task, completed=report.new_tokens + report.cached_tokens, step=report.steps)

    with progress:
        yield on_step


def replay_as_json(report: ReplayReport) -> dict[str, Any]:
    verification = dataclasses.asdict(report.verification)
    if not math.isfinite(verification["error"]):  # JSON has no infinity
        verification["error"] = None
    return {
        **dataclasses.asdict(report),
        "hit_rate": report.hit_rate,
        "tokens_per_second": report.tokens_per_second,
        "seconds": {name: report.seconds[name] for name in STAGES},
        "gflops": report.gflops,
        "verification": {**verification, "passed": report.verification.passed},
    }


def print_replay(console: LiteralConsole, report: ReplayReport) -> None:
    config, check = report.config, report.verification
    console.print(
        console.render_str(config.model, style="bold"),
        f", tp {config.tp}: {report.heads} heads, {config.dtype} on {config.device}, "
        f"{report.threads} CPU threads, softmax scale {report.scale:.6f}",
        sep="",
    )
    summary = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None, padding=(0, 2, 0, 0))
    summary.add_row("requests", f"{report.requests:,} in {report.steps:,} steps of up to {config.budget:,} tokens")
    summary.add_row("new tokens", f"{report.new_tokens:,}")
    summary.add_row(
        "cached tokens",
        f"{report.cached_tokens:,} (hit rate {report.hit_rate:.1%}), {report.evictions:,} blocks evicted",
    )
    summary.add_row("context", f"{report.context_rows:,} rows gathered in {report.chunks:,} chunks")
    summary.add_row("speed", f"{report.tokens_per_second:,.0f} tokens/s through one layer", style="bold")
    summary.add_row(
        "time", f"{report.layer_seconds:.1f} s in the layer, {report.total_seconds:.1f} s with inputs and checks"
    )
    summary.add_row(
        "memory",
        f"peak {_mib(report.peak_rss_bytes)}, of it cache {_mib(report.cache_bytes)}, "
        f"workspace {_mib(report.workspace_bytes)}",
    )
    console.print(summary)

    stages = Table("stage", "time", "share", "GFLOP (no padding)", "GFLOP/s")
    for column in stages.columns[1:]:
        column.justify = "right"
    flops = {"attention": report.attention_flops, "projection": report.projection_flops}
    for name in STAGES:
        seconds = report.seconds[name]
        share = seconds / report.layer_seconds if report.layer_seconds else 0.0
        work = (f"{flops[name] / 1e9:,.0f}", f"{report.gflops[name]:,.1f}") if name in flops else ("", "")
        stages.add_row(name, f"{seconds:.2f} s", f"{share:.1%}", *work)
    console.print_numbers(stages)

    if check.samples == 0:
        console.print("not checked against the oracle (--verify 0)")
    else:
        verdict, style = ("passed", "green") if check.passed else (f"FAILED, {check.failures:,} wrong", "bold red")
        console.print(
            f"float64 oracle, {check.samples:,} samples: ",
            console.render_str(verdict, style=style),
            f"; the one nearest to its tolerance has error {check.error:.2e} of {check.tolerance:.2e} ({check.where})",
            sep="",
        )


def print_schedule(
    console: LiteralConsole, schedule: Schedule, measured: Schedule | None, rows: int, picture: Path
) -> None:
    console.print(
        f"{len(schedule.lengths):,} sequences, {schedule.heads} heads, {'causal' if schedule.causal else 'full'}, "
        f"{schedule.kernel}: ",
        console.render_str(describe_tickets(schedule), style="bold"),
        sep="",
    )
    _print_makespan(console, "modelled", schedule, 0)
    if measured is not None:
        _print_makespan(console, "measured", measured, 1)
        _print_costs(console, schedule, measured)
    table = Table("item", "seq", "rows", "keys", "heads", "cost", "worker", "start")
    if measured is not None:
        for name in ("SM", "start µs", "µs"):
            table.add_column(name)
    for column in table.columns:
        column.justify = "right"
    item_index = -1
    for index, entry in enumerate(schedule.tickets[:rows]):
        ticket, item = entry.ticket, entry.ticket.item
        item_index += ticket.piece == 0
        cells = [
            f"{item_index} ({ticket.piece + 1}/{item.num_splits})" if item.num_splits > 1 else str(item_index),
            str(item.seq),
            f"{item.q_begin}..{item.q_begin + item.q_rows}",
            f"{ticket.kv_begin}..{ticket.kv_end}",
            f"{item.head_begin}..{item.head_begin + item.head_count}",
            str(entry.cost),
            str(entry.worker),
            str(entry.start),
        ]
        if measured is not None:
            real = measured.tickets[index]
            cells += [str(real.worker), f"{real.start:.1f}", f"{real.cost:.1f}"]
        table.add_row(*cells)
    if rows:
        console.print_numbers(table)
    if len(schedule.tickets) > rows > 0:
        console.print(f"and {len(schedule.tickets) - rows:,} more")
    console.print(f"picture: {picture}", soft_wrap=True)


def _print_makespan(console: LiteralConsole, kind: str, schedule: Schedule, digits: int) -> None:
    over = schedule.makespan / schedule.bound - 1 if schedule.bound else 0.0
    console.print(
        f"{kind} makespan {schedule.makespan:,.{digits}f} {schedule.unit}, lower bound {schedule.bound:,.{digits}f} "
        f"({over:.1%} above it), ",
        console.render_str(f"{schedule.balance:.1%} busy", style="bold"),
        sep="",
    )


def _print_costs(console: LiteralConsole, schedule: Schedule, measured: Schedule) -> None:
    """What the plan counts for an item against what the card takes."""
    console.print(f"the GPU's clock ticks every {resolution(measured):,} ns")
    fit = fit_cost(measured)
    if fit is None:
        console.print("no fit of the long items' cost: it takes items of different numbers of key tiles")
        return
    console.print(
        "long items: ",
        console.render_str(f"{fit.per_tile:.3f} µs per key tile, {fit.overhead:.3f} µs to start a head", style="bold"),
        f", {fit.overhead / fit.per_tile:.2f} key tiles (the plan counts {schedule.item_overhead})",
        sep="",
    )
    short = [
        (real.cost, entry.cost, entry.ticket.item.head_count)
        for entry, real in zip(schedule.tickets, measured.tickets, strict=True)
        if entry.ticket.is_short and entry.ticket.tiles
    ]
    if short:
        took, counted, heads = (sum(column) / len(short) for column in zip(*short, strict=True))
        console.print(
            f"short items: {took / heads:.3f} µs for a head, {took / heads / fit.per_tile:.2f} key tiles "
            f"(the plan counts {counted / heads:.2f})"
        )


def print_doctor(console: LiteralConsole, report: dict[str, Any]) -> None:
    console.print(
        console.render_str(f"mla_prefill {report['mla_prefill']}", style="bold"),
        f", Python {report['python']}, torch {report['torch']}",
        sep="",
    )
    if report["build"] is None:
        console.print(f"no build information: {report['build_problem']}", style="yellow", soft_wrap=True)
    else:
        console.print("build: " + ", ".join(f"{key} {value}" for key, value in report["build"].items()))
    console.print(f"ops: {', '.join(report['ops']) or 'none registered'}")

    console.print("devices:")
    for device in report["devices"]:
        _print_indented(console, 2, f"{device['device']}: {device['name']}, {device['detail']}")
    if report["kernels"]:
        console.print("kernels:")
    for kernel in report["kernels"]:
        what = f"{kernel['detail']}; {kernel['dtypes']}; head dims: {kernel['head_dims']}"
        _print_verdict(console, kernel, [kernel["reason"], what] if kernel["reason"] else [what])
    question = report["question"]
    console.print(
        f"prefill backend for {question['model'] or 'any model'}, {question['dtype']}, {question['device']}: ",
        console.render_str(report["prefill_backend"] or "none", style="bold"),
        sep="",
    )
    for backend in report["prefill_backends"]:
        _print_verdict(console, backend, backend["reasons"])


def _print_verdict(console: LiteralConsole, row: dict[str, Any], below: Sequence[str]) -> None:
    """Not a table: a reason has the whole width, whatever that is."""
    verdict, style = ("usable", "green") if row["usable"] else ("not usable", "yellow")
    _print_indented(console, 2, console.render_str(f"{row['backend']}: ").append(verdict, style))
    for line in below:
        _print_indented(console, 4, line)


def _print_indented(console: LiteralConsole, columns: int, line: RenderableType) -> None:
    console.print(Padding(line, (0, 0, 0, columns), expand=False))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
