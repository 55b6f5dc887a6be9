"""The commands on input that nobody meant: one line that says so, or an answer, and never a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cli import run
from test_replay import TINY, record, write
from test_timeline import measured_of, schedule_of, stamps_of
from typer.testing import CliRunner, Result

from mla_prefill import cli
from mla_prefill.cli import app as app_module
from mla_prefill.cli import console as console_module
from mla_prefill.cli import doctor, output, work_list
from mla_prefill.cli.console import LiteralConsole, printable
from mla_prefill.cli.replay import ReplayConfig, ReplayReport

# Markup that opens, closes nothing, or is none; emoji codes; what a terminal would obey.
ODD = [
    "run[v2]",
    "x[/v2]",
    "[/x]",
    "[bold]b[/bold]",
    "[link=a]",
    "\\[a]",
    ":smile:",
    "\x1b[31mred",
    "two\nlines",
    "\u202ek",
]


def refused(*arguments: object, **options: Any) -> str:
    """The one line that a command ends with."""
    result = CliRunner().invoke(app_module.app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


def squeezed(text: str) -> str:
    """Without the spaces and lines that wrapping puts in."""
    return "".join(text.split())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", *(vars(request) for request in TINY))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes half a second."""
    monkeypatch.setattr(work_list, "draw", lambda *arguments: None)


# ---- literal text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ODD)
def test_an_argument_is_named_as_it_is(odd: str, trace: Path) -> None:
    for command in (
        ("replay", f"{odd}.jsonl"),
        ("replay", trace, "--model", odd),
        ("replay", trace, "--dtype", odd),
        ("replay", trace, "--device", odd),
        ("plan", "--lengths", odd),
        ("plan", "--lengths", "5", "--kernel", odd),
        ("plan", "--lengths", "5", "--out", odd),
        ("doctor", "--model", odd),
        ("doctor", "--dtype", odd),
        ("doctor", "--device", odd),
    ):
        assert repr(odd)[1:-1] in refused(*command)


@pytest.mark.parametrize("odd", [*ODD, "\udcff"])
@pytest.mark.usefixtures("undrawn")
def test_a_file_is_named_as_it_is(odd: str, tmp_path: Path) -> None:
    folder = tmp_path / odd.replace("/", "")
    folder.mkdir()
    trace = write(folder / "t.jsonl", record(), record(output_length=odd))
    error = refused("replay", trace)
    assert error.startswith(f"error: {printable(str(trace))}:2: output_length: expected an integer >= 0, got ")
    assert error.endswith(repr(odd))
    result = run("plan", "--lengths", "5", "--out", folder / "plan.png")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"picture: {printable(str(folder / 'plan.png'))}"


@pytest.mark.parametrize("odd", ODD[:-3])
def test_help_and_usage_errors_are_literal(odd: str) -> None:
    helped = CliRunner().invoke(app_module.app, ["doctor", "--help"], prog_name=odd)
    assert helped.exit_code == 0 and f"Usage: {odd} doctor" in helped.stdout
    for wrong in ([odd], ["doctor", odd], ["doctor", f"--{odd}"]):
        result = run(*wrong)
        named = odd.partition("=")[0] if odd.isprintable() else printable(odd)[:4]
        assert result.exit_code == 2 and named in result.stderr and "\x1b" not in result.stderr


def test_every_string_of_a_report_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Device names, processor names, reasons of libraries, what the environment forces: whatever holds them."""
    strings: list[str] = []

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        if not isinstance(value, str):
            return value
        strings.append(f"[/x]{len(strings)}:smile:\x1b[2J{value}")
        return strings[-1]

    report = doctor.examine("deepseek-v3", "float64", "cpu")
    for kernel in report["kernels"]:  # what is not printed apart
        kernel.pop("compute_capability", None)
    output.print_doctor(LiteralConsole(), spoil(report))
    printed = squeezed(capsys.readouterr().out)
    assert len(strings) > 30 and not [text for text in strings if squeezed(printable(text)) not in printed]

    output.print_doctor(LiteralConsole(), {**report, "build": None, "build_problem": "[/no] :smile: \x1b[2J"})
    assert "no build information: [/no] :smile: \\x1b[2J" in capsys.readouterr().out

    config = ReplayConfig(model="[/m]", dtype="[/d]", device="[/e]\n")
    output.print_replay(LiteralConsole(), ReplayReport(config, heads=1, scale=1.0, threads=1))
    assert "[/m], tp 1: 1 heads, [/d] on [/e]\\n," in capsys.readouterr().out


def test_a_forced_kernel_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has a GPU, which may have any name."""
    gpu = SimpleNamespace(name="[/gpu]", major=9, minor=0, total_memory=2**37)
    monkeypatch.setattr(doctor, "_gpus", lambda: [gpu])
    monkeypatch.setattr(doctor, "_runs_on", lambda *arguments: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    table = [{"backend": "sm90", "dtypes": "bfloat16", "head_dims": "any", "detail": "", "compute_capability": "9.0"}]
    monkeypatch.setattr(
        doctor, "import_module", lambda name: SimpleNamespace(build_info=dict, kernel_table=lambda: table)
    )
    monkeypatch.setenv("MLA_PREFILL_FORCE", "[/x]:smile:")
    printed = run("doctor", "--device", "cpu").stdout
    assert "MLA_PREFILL_FORCE is [/x]:smile:" in printed and "cuda:0: [/gpu], sm_90, 128 GiB" in printed


# ---- any encoding, any width -----------------------------------------------------------------------------------------


def run_main(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: object) -> tuple[int, str, str]:
    """The process's own entry, stdout and stderr being files of an encoding."""
    files = [io.BytesIO(), io.BytesIO()]
    stdout, stderr = (io.TextIOWrapper(file, encoding, errors="strict") for file in files)
    monkeypatch.setattr(sys, "argv", ["mla-prefill", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    stdout.flush()
    stderr.flush()
    return ended.value.code, *(file.getvalue().decode(encoding) for file in files)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8", "utf-16"])
def test_any_encoding_is_written(encoding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trace: Path) -> None:
    for command in (
        ["doctor"],
        ["doctor", "--json"],
        ["--help"],
        ["replay", trace, "--tp", 8, "--budget", 512],
        ["plan", "--lengths", "300,17", "--rows", 1, "--out", tmp_path / "é €.png"],
    ):
        code, printed, _ = run_main(monkeypatch, encoding, *command)
        assert code == 0 and printed
    stand_ins = {"ascii": "\\xe9 \\u20ac", "latin-1": "é \\u20ac", "cp437": "é \\u20ac"}
    assert f"{stand_ins.get(encoding, 'é €')}.png" in printed
    code, _, error = run_main(monkeypatch, encoding, "replay", "é €.jsonl")
    assert code == 2 and error.count("\n") == 1 and f"'{stand_ins.get(encoding, 'é €')}.jsonl'" in error


@pytest.mark.usefixtures("undrawn")
def test_microseconds_in_ascii(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    schedule = schedule_of()
    monkeypatch.setattr(app_module.timeline, "measure", lambda schedule: measured_of(schedule, stamps_of(schedule)))
    lengths = ",".join(f"{q}:{k}" for q, k in schedule.lengths)
    arguments = ["--heads", 3, "--kernel", "sm90", "--sms", 6, "--measure", "--out", tmp_path / "plan.png"]
    code, printed, _ = run_main(monkeypatch, "ascii", "plan", "--lengths", lengths, *arguments)
    assert code == 0
    assert "start us" in printed and "0.350 us per key tile" in printed and "and 105 more" in printed


def run_at_width(columns: int, *arguments: object) -> Result:
    """A console takes the width of where it was made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(app_module, "_console", LiteralConsole())
        return CliRunner().invoke(app_module.app, [*map(str, arguments)])


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_doctor_cuts_nothing(columns: int) -> None:
    report = json.loads(run("doctor", "--json").stdout)
    result = run_at_width(columns, "doctor")
    assert result.exit_code == 0 and "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= columns
    printed = squeezed(result.stdout)
    for row in (*report["kernels"], *report["prefill_backends"]):
        for text in (row["backend"], *row.get("reasons", [row.get("reason")]), row.get("detail", "")):
            assert squeezed(text) in printed
    assert 'register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM,"package.module.Class")' in printed


def test_doctor_has_a_row_for_each_kernel() -> None:
    kernels = [(row["backend"], row["detail"]) for row in json.loads(run("doctor", "--json").stdout)["kernels"]]
    assert len(kernels) == len(set(kernels)) > 0


@pytest.mark.usefixtures("undrawn")
def test_tables_of_numbers_are_whole_at_any_width(trace: Path, tmp_path: Path) -> None:
    def table(*arguments: object, width: int) -> list[str]:
        result = run_at_width(width, *arguments)
        assert result.exit_code == 0 and "…" not in result.stdout
        return [line.rstrip() for line in result.stdout.splitlines() if line[0] in "┃│"]

    plan = ("plan", "--lengths", "64:900000,8*512", "--heads", 16, "--kernel", "sm90", "--out", tmp_path / "plan.png")
    whole = table(*plan, width=1000)
    assert len(whole) == 13 and min(map(len, whole)) > 60
    for columns in (20, 40, 60, 80):
        assert table(*plan, width=columns) == whole
        stages = table("replay", trace, "--tp", 8, "--budget", 512, "--max-steps", 1, width=columns)
        assert [line.split()[1] for line in stages] == ["stage", *output.STAGES]
        assert all(line[-1] in "┃│" for line in stages)


# ---- values out of range ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 10**30])
@pytest.mark.parametrize("option", ["requests", "max-length", "max-steps", "threads"])
def test_replay_names_a_count_out_of_range(option: str, value: int, trace: Path) -> None:
    name = option.replace("-", "_")
    assert refused("replay", trace, f"--{option}={value}").startswith(f"error: {name}: expected 1 to ")


@pytest.mark.parametrize("value", [0, -1, -(10**30)])
@pytest.mark.parametrize("option", ["tp", "budget", "block-size", "cache-tokens", "workspace-rows"])
def test_replay_names_a_size_out_of_range(option: str, value: int, trace: Path) -> None:
    name = option.replace("-", "_")
    assert refused("replay", trace, f"--{option}={value}").startswith(f"error: {name}: expected ")


@pytest.mark.parametrize("device", ["foo", "cuda:x", "meta", "cuda:99", "xla", "privateuseone", "CPU", ""])
def test_a_device_that_computes_nothing_is_named(device: str, trace: Path) -> None:
    error = refused("replay", trace, "--device", device)
    assert error.startswith("error: device: expected cpu") and error.endswith(f"got {device!r}")


def test_a_build_of_torch_without_a_device_is_named(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    for device in ("cuda", "cuda:0", "mps"):
        assert refused("replay", trace, "--device", device) == f"error: device: expected cpu, got {device!r}"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    expected = "error: device: expected cpu or cuda or cuda:0 or cuda:1, got 'cuda:2'"
    assert refused("replay", trace, "--device", "cuda:2") == expected


def test_demo_names_threads_out_of_range() -> None:
    assert refused("demo", "--threads", 100_000) == "error: threads: expected 1 to 1,024, got 100000"


def test_every_dtype_of_torch_is_answered() -> None:
    dtypes = {value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    supported = {torch.bfloat16, torch.float16, torch.float32}
    assert supported < set(dtypes)
    for dtype, name in dtypes.items():
        assert doctor.examine(None, name)["question"]["dtype"] == name
        assert (doctor.examine(None, name, "cpu")["prefill_backend"] is None) == (dtype not in supported)
    for name in ("nn", "__version__", "cuda", "a.b", "\udcff", ""):
        assert refused("doctor", "--dtype", name).startswith("error: dtype: expected the name of a torch dtype, got ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--heads", 10**8), "lengths x heads: expected at most 2,000,000 query tiles of 64 rows, got 100,000,000"),
        (("--lengths", "100000*65", "--heads", 128), "lengths x heads: expected at most 2,000,000 query tiles"),
        (("--lengths", 2**31 - 1), "lengths x heads: expected at most 2,000,000 query tiles"),
        (("--lengths", "8:9999999999"), "lengths: expected fewer than 2^31 rows and keys in all"),
        (("--heads", 0), "heads: expected 1 to 2,147,483,647, got 0"),
        (("--heads", 10**12), "heads: expected 1 to 2,147,483,647, got 1000000000000"),
        (("--sms", 3 * 10**9), "sms: expected 1 to 100,000, got 3000000000"),
        (("--sms", -1), "sms: expected 1 to 100,000, got -1"),
        (("--rows", 10**9), "rows: expected 0 to 10,000, got 1000000000"),
        (("--rows", -1), "rows: expected 0 to 10,000, got -1"),
        (("--out", "plan"), "out: expected a file name that ends in .eps, .jpg, .pdf, .png, .svg, .webp, got 'plan'"),
        (("--out", "plan.xyz"), "out: expected a file name that ends in .eps, .jpg, .pdf, .png, .svg, .webp"),
        (("--out", "no/where/plan.png"), "out: expected a file in a folder that exists, got 'no/where/plan.png'"),
        (("--out", "/dev/null/plan.png"), "out: expected a file in a folder that exists, got '/dev/null/plan.png'"),
        (("--out", "."), "out: expected a file name that ends in"),
    ],
)
def test_plan_names_what_is_too_much(options: tuple, message: str, tmp_path: Path) -> None:
    """All of it before any work."""
    defaults = ("--lengths", "5", "--out", tmp_path / "plan.png")
    assert message in refused("plan", *defaults, *options)


def test_plan_names_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert refused("plan", "--lengths", "5", "--out", folder).startswith("error: out: expected a file in a folder")


@pytest.mark.parametrize("ending", work_list.PICTURES)
def test_plan_draws_every_format(ending: str, tmp_path: Path) -> None:
    result = run("plan", "--lengths", "300,17", "--out", tmp_path / f"plan{ending.upper()}")
    assert result.exit_code == 0 and [path.stat().st_size > 1000 for path in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize(
    "options", [("--heads", 2**31 - 1, "--lengths", "3*0"), ("--sms", 100_000), ("--rows", 10_000)]
)
@pytest.mark.usefixtures("undrawn")
def test_plan_takes_what_costs_nothing(options: tuple, tmp_path: Path) -> None:
    assert run("plan", "--lengths", "5", "--out", tmp_path / "plan.png", *options).exit_code == 0


# ---- memory, pipes and signals ---------------------------------------------------------------------------------------


def from_torch(*arguments: object) -> None:
    torch.empty(2**50)


def from_python(*arguments: object) -> None:
    raise MemoryError


def from_a_gpu(*arguments: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total of 1 GiB.\nSee.")


@pytest.mark.parametrize(
    ("lacking", "wanted"), [(from_torch, "4503599627370496 bytes"), (from_python, "more"), (from_a_gpu, "20.00 GiB")]
)
def test_memory_that_is_not_there_is_named(
    lacking: Callable[..., None], wanted: str, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "replay", lacking)
    expected = f"error: memory: expected room for {wanted}, got none: smaller sizes need less"
    assert refused("replay", trace) == expected


def test_a_cache_that_can_not_be_is_named(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = app_module.Request(0, 2**31 - 1, 1, (1,) * 2**22)
    monkeypatch.setattr(app_module, "read_trace", lambda *arguments: [prompt])
    assert refused("replay", trace, "--cache-tokens", 2**40, "--block-size", 1).startswith(
        "error: memory: expected room"
    )


@pytest.mark.parametrize("bug", [RuntimeError("[/oops] tried to allocate"), TypeError("oops"), AssertionError("oops")])
def test_a_bug_stays_a_bug(bug: Exception, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*arguments: object) -> None:
        raise bug

    monkeypatch.setattr(app_module, "replay", planted)
    assert run("replay", trace).exception is bug


def test_an_interrupt_ends_quietly(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_module, "replay", interrupted)
    result = run("replay", trace)
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "")
    monkeypatch.setattr(console_module, "write_any_encoding", interrupted)
    assert run_main(monkeypatch, "utf-8", "doctor") == (130, "", "")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, _ = run_main(monkeypatch, "utf-8", "plan", "--lengths", "5", "--out", tmp_path / "plan.png")
    assert code.startswith("mla-prefill needs the package matplotlib: pip install 'mla-prefill[cli]'")


def test_help_that_can_not_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app_module, "app", full)
    assert run_main(monkeypatch, "utf-8", "--help") == ("error: [Errno 28] No space left on device", "", "")


PROCESSES = """
import os, sys
from mla_prefill import cli
from mla_prefill.cli import app
for name, *arguments in {scenarios}:
    if (child := os.fork()) == 0:
        if name == "unread":
            reader, stdout = os.pipe()
            os.close(reader)
            os.dup2(stdout, 1)
        elif name == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.argv[1:] = arguments
        cli.main()
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr, flush=True)
"""


def test_pipes_full_disks_and_locales() -> None:
    """No traceback, no warning when the interpreter ends; ASCII for an ASCII locale."""
    scenarios = [("unread", "doctor"), ("full", "doctor", "--json"), ("stdin", "replay", "-"), ("locale", "doctor")]
    result = subprocess.run(
        [sys.executable, "-c", PROCESSES.format(scenarios=scenarios)],
        input=b"\n{\n",
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
    )
    assert result.stdout.isascii() and b"NATIVE: usable" in result.stdout
    unread, no_space, full, no_json, *others = result.stderr.decode("ascii").splitlines()
    assert (unread, no_space, full) == ("unread 1", "error: [Errno 28] No space left on device", "full 2")
    assert no_json.startswith("error: /dev/stdin:2: expected a JSON object, got '{'")
    assert others == ["stdin 2", "locale 0"]
