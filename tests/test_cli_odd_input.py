"""The commands on input that nobody meant: one line that says so, or an answer, and never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import run
from test_replay import TINY, write
from typer.testing import CliRunner

from mla_prefill.cli import app as app_module
from mla_prefill.cli import doctor, work_list


def refused(*arguments: object, **options: Any) -> str:
    """The one line that a command ends with."""
    result = CliRunner().invoke(app_module.app, [str(argument) for argument in arguments], **options)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", *(vars(request) for request in TINY))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes half a second."""
    monkeypatch.setattr(work_list, "draw", lambda *arguments: None)


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
