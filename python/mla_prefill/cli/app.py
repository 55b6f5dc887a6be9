"""The commands. What they do lives in the modules beside this one, what they print in ``output``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated

import torch
import typer

from mla_prefill.cli import doctor as doctor_report
from mla_prefill.cli import output, timeline, work_list
from mla_prefill.cli.checks import expect_between
from mla_prefill.cli.console import LiteralConsole
from mla_prefill.cli.replay import ReplayConfig, ReplayReport, replay
from mla_prefill.cli.trace import Request, read_trace
from mla_prefill.models import MODELS

app = typer.Typer(
    help="Prefill attention of MLA models: replay a request trace, look at a plan, see what is built.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help and usage errors are plain text
)

_console = LiteralConsole()
_errors = LiteralConsole(stderr=True)

_DEFAULTS = ReplayConfig()

# 18 steps, 142,000 new tokens, 4.5 TFLOP of attention.
DEMO_REQUESTS = 40
DEMO_MAX_LENGTH = 8192

_NEXT = (
    "Next: mla-prefill replay TRACE --model deepseek-v3 --tp 8    a trace of yours",
    "      mla-prefill plan --lengths 4096,8*512,64:8192          a schedule, drawn",
    "      mla-prefill doctor                                     what is built",
)

_MAX_THREADS = 1024
_MAX_ROWS = 10_000  # the layout of 1,000 takes a second

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
VerifyOption = Annotated[int, typer.Option(help="Sampled (row, head) pairs per step to check against the oracle.")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads; torch's choice if not given.")]
SeedOption = Annotated[int, typer.Option(help="Of weights, latents and queries.")]


@app.command("replay")
def replay_command(
    trace: Annotated[Path, typer.Argument(help="Requests in Mooncake's format, one JSON object a line; -: stdin.")],
    model: Annotated[str, typer.Option(help=f"Model shape: {', '.join(MODELS)}.")] = _DEFAULTS.model,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; one rank's heads are run.")] = _DEFAULTS.tp,
    requests: Annotated[int | None, typer.Option(help="Only the trace's first N requests.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Only prompts of up to N tokens.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after N steps.")] = None,
    budget: Annotated[int, typer.Option(help="New tokens per step.")] = _DEFAULTS.budget,
    block_size: Annotated[int, typer.Option(help="Tokens per cache block; divides 512.")] = _DEFAULTS.block_size,
    cache_tokens: Annotated[int, typer.Option(help="Room in the latent cache.")] = _DEFAULTS.cache_tokens,
    workspace_rows: Annotated[int, typer.Option(help="Context rows gathered at once.")] = _DEFAULTS.workspace_rows,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = _DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = _DEFAULTS.device,
    verify: VerifyOption = _DEFAULTS.verify,
    seed: SeedOption = _DEFAULTS.seed,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a request trace and check it.

    Requests are scheduled into steps (chunked prefill, prefix cache, paged latent cache) and each step runs through
    one attention layer with random weights. Exit status 1: a sampled result missed its tolerance.
    """
    with _user_errors():
        for name, value in (("requests", requests), ("max_length", max_length), ("max_steps", max_steps)):
            if value is not None:
                expect_between(name, value, 1)
        report = _replay(
            read_trace(Path("/dev/stdin") if trace == Path("-") else trace, requests, max_length),
            ReplayConfig(
                model=model,
                tp=tp,
                dtype=dtype,
                device=device,
                budget=budget,
                block_size=block_size,
                cache_tokens=cache_tokens,
                workspace_rows=workspace_rows,
                max_steps=max_steps,
                verify=verify,
                seed=seed,
            ),
            threads,
        )
        _finish(report, as_json)


@app.command()
def demo(threads: ThreadsOption = None, as_json: JsonOption = False) -> None:
    """Replay a part of the packaged trace.

    It has the shape of DeepSeek-V2-Lite and takes one to two minutes on 2 CPU cores.
    """
    sample = resources.files("mla_prefill") / "data" / "mooncake_sample.jsonl"
    with resources.as_file(sample) as path, _user_errors():
        report = _replay(read_trace(path, DEMO_REQUESTS, DEMO_MAX_LENGTH), _DEFAULTS, threads)
        _finish(report, as_json, _NEXT)


@app.command()
def plan(
    lengths: Annotated[str, typer.Option(help="Sequences: Q or Q:KV, several alike as N*Q:KV, separated by commas.")],
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal mask, aligned bottom-right, or none.")] = True,
    kernel: Annotated[
        str | None, typer.Option(help=f"{', '.join(work_list.KERNELS)}; the one that would run here if not given.")
    ] = None,
    sms: Annotated[
        int | None, typer.Option("--sms", help="SMs or CPU threads; this machine's, or an H200's, if not given.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the batch too, and draw when the GPU's SMs did what (sm90).")
    ] = False,
    out: Annotated[Path, typer.Option(help="Picture of the schedule.")] = Path("plan.png"),
    rows: Annotated[int, typer.Option(help="Work items to print.")] = 12,
) -> None:
    """Print and draw the work list of a batch.

    The picture shows its schedule as modelled and, with --measure, as it ran.
    """
    with _user_errors():
        expect_between("rows", rows, 0, _MAX_ROWS)
        work_list.expect_picture(out)
        schedule = work_list.make_schedule(
            work_list.parse_lengths(lengths), heads=heads, causal=causal, kernel=kernel, workers=sms
        )
        measured = timeline.measure(schedule) if measure else None
        work_list.draw(schedule, out, measured)
        output.print_schedule(_console, schedule, measured, rows, out)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Ask for this model's head dims (any if not given).")] = None,
    dtype: Annotated[str, typer.Option(help="Ask for inputs of this dtype.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the accelerator, if any, if not given.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is built and usable, and why.

    It lists the devices and, for each kernel and backend, what there is against it.
    """
    with _user_errors():
        report = doctor_report.examine(model, dtype, device)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            output.print_doctor(_console, report)


def _replay(requests: list[Request], config: ReplayConfig, threads: int | None) -> ReplayReport:
    if threads is not None:
        expect_between("threads", threads, 1, _MAX_THREADS)
        torch.set_num_threads(threads)
    with output.replay_progress(_errors, requests) as on_step:
        return replay(requests, config, on_step)


def _finish(report: ReplayReport, as_json: bool, hints: Sequence[str] = ()) -> None:
    if as_json:
        typer.echo(json.dumps(output.replay_as_json(report), indent=2, allow_nan=False))
    else:
        output.print_replay(_console, report)
        for hint in hints:
            _console.print(hint)
    if not report.verification.passed:
        raise typer.Exit(1)


@contextmanager
def _user_errors() -> Iterator[None]:
    """What the user can put right is one line and exit status 2, not a traceback."""
    try:
        yield
    except BrokenPipeError:  # whoever reads the output has enough; typer ends the command
        raise
    except (ValueError, OSError) as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:
        if (wanted := _memory_wanted(error)) is None:
            raise
        message = f"memory: expected room for {wanted}, got none: smaller sizes need less"
    else:
        return
    _errors.print(_errors.render_str("error:", style="red"), message, soft_wrap=True)
    raise typer.Exit(2)


def _memory_wanted(error: Exception) -> str | None:
    """What could not be allocated; None: the error is another one. torch has a type for GPU memory only."""
    found = re.search(r"(?:allocator|out of memory).*tried to allocate ([\d.]+ \w+)", str(error), re.I | re.S)
    if found is not None:
        return found[1]
    return "more" if isinstance(error, MemoryError | torch.OutOfMemoryError) else None
