"""The commands, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_replay import TINY, lost_context, record, write
from typer.testing import CliRunner

from mla_prefill.cli import app as app_module
from mla_prefill.cli import work_list
from mla_prefill.cli.app import app

PNG = b"\x89PNG"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", *(vars(request) for request in TINY))


SMALL = ("--tp", 8, "--budget", 512, "--workspace-rows", 256)


def test_replay_reports(trace: Path) -> None:
    result = run("replay", trace, *SMALL)
    assert result.exit_code == 0, result.output
    for text in ("deepseek-v2-lite", "tokens/s", "hit rate 27.9%", "attention", "projection", "gather", "passed"):
        assert text in result.stdout


def test_replay_as_json(trace: Path) -> None:
    result = run("replay", trace, *SMALL, "--json", "--verify", 5)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["requests"] == 4
    assert report["new_tokens"] + report["cached_tokens"] == 2520
    assert report["verification"]["passed"] and report["verification"]["samples"] == 5 * report["steps"]
    assert report["config"]["tp"] == 8 and report["heads"] == 2
    assert set(report["seconds"]) == {"write_cache", "gather", "projection", "attention"}
    assert min(report["gflops"].values()) > 0
    assert report["peak_rss_bytes"] > report["workspace_bytes"] > 0


def test_replay_fails_on_a_wrong_result(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost_context(monkeypatch)
    result = run("replay", trace, *SMALL)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    result = run("replay", trace, *SMALL, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verification"]["passed"] is False


def test_replay_options_reach_the_replay(trace: Path) -> None:
    result = run(
        "replay", trace, "--model", "glm-4.7-flash", "--tp", 10, "--requests", 2, "--max-length", 500, "--max-steps", 1,
        "--budget", 100, "--block-size", 128, "--dtype", "float32", "--seed", 3, "--verify", 1, "--json",
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert (report["steps"], report["new_tokens"], report["requests"], report["heads"]) == (1, 100, 1, 2)
    config = report["config"]
    assert (config["block_size"], config["dtype"], config["seed"]) == (128, "float32", 3)


def test_a_malformed_trace_is_one_line_of_error(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", record(), record(input_length="long"))
    result = run("replay", trace)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert (
        result.stderr.strip() == f"error: {trace}:2: input_length: expected an integer from 1 to 2147483647, got 'long'"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-2"), "model: expected one of"),
        (("--tp", 5), "tp: expected a divisor of the 16 heads, got 5"),
        (("--cache-tokens", 64), "cache_tokens: expected room for the longest prompt"),
    ],
)
def test_a_wrong_setting_is_one_line_of_error(trace: Path, arguments: tuple, message: str) -> None:
    result = run("replay", trace, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_trace_is_one_line_of_error(tmp_path: Path) -> None:
    result = run("replay", tmp_path / "nothing.jsonl")
    assert result.exit_code == 2
    assert "nothing.jsonl" in result.stderr


def test_demo_replays_the_packaged_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "DEMO_REQUESTS", 2)
    monkeypatch.setattr(app_module, "DEMO_MAX_LENGTH", 1000)
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "passed" in result.stdout and "mla-prefill replay TRACE" in result.stdout
    report = json.loads(run("demo", "--json").stdout)
    assert report["requests"] == 2 and report["config"]["model"] == "deepseek-v2-lite"


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_plan_prints_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    result = run("plan", "--lengths", "4096, 8*512, 64:8192", "--heads", 4, "--sms", 16, "--out", picture, "--rows", 3)
    assert result.exit_code == 0, result.output
    assert "10 sequences, 4 heads, causal" in result.stdout
    assert "lower bound" in result.stdout and "more" in result.stdout
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize("lengths", ["0", "5:0", "300*7:9", "1", "0,0:4,128"])
@pytest.mark.parametrize("mask", ["--causal", "--full"])
def test_plan_draws_any_batch(tmp_path: Path, lengths: str, mask: str) -> None:
    result = run("plan", "--lengths", lengths, mask, "--heads", 2, "--sms", 3, "--out", tmp_path / "plan.png")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("lengths", ["", "abc", "12;13", "3**4", "-5", "8*", "1.5", "100001*1", "0*5", "1" * 11])
def test_plan_names_wrong_lengths(tmp_path: Path, lengths: str) -> None:
    result = run("plan", f"--lengths={lengths}", "--out", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "lengths: expected" in result.stderr


def test_parse_lengths() -> None:
    assert work_list.parse_lengths("4096,2x512 , 3*64:8192") == [(4096, 4096)] + [(512, 512)] * 2 + [(64, 8192)] * 3


def test_schedule_covers_the_work_and_no_worker_does_two_things_at_once() -> None:
    lengths = [(300, 300), (0, 5), (64, 8192), *[(17, 40)] * 20]
    schedule = work_list.make_schedule(lengths, heads=5, causal=True, kernel="cpu", workers=7)
    rows = sum(entry.ticket.item.q_rows * entry.ticket.item.head_count for entry in schedule.tickets)
    assert rows == 5 * sum(q for q, _ in lengths)
    free = [0] * 7
    for entry in schedule.tickets:
        assert entry.start == free[entry.worker] == min(free)
        free[entry.worker] += entry.cost
    assert schedule.makespan == max(free) >= schedule.bound
    assert schedule.total == sum(free)
    assert 0 < schedule.balance <= 1


@pytest.mark.parametrize("kernel", work_list.KERNELS)
def test_plan_of_each_kernel(tmp_path: Path, kernel: str) -> None:
    picture = tmp_path / "plan.png"
    result = run("plan", "--lengths", "300,3*17:40,64:9000", "--heads", 3, "--kernel", kernel, "--out", picture)
    assert result.exit_code == 0, result.output
    workers = f"{torch.get_num_threads()} threads" if kernel == "cpu" else "SMs"
    assert f"3 heads, causal, {kernel}:" in result.stdout and workers in " ".join(result.stdout.split())
    assert picture.read_bytes().startswith(PNG)


def test_plan_names_a_wrong_kernel(tmp_path: Path) -> None:
    result = run("plan", "--lengths", "5", "--kernel", "sm70", "--out", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert result.stderr.strip() == "error: kernel: expected one of cpu, sm90, sm80, hip, got 'sm70'"


def test_plan_measures_where_the_kernel_runs_only(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    result = run("plan", "--lengths", "5", "--kernel", "sm80", "--measure", "--out", picture)
    assert result.exit_code == 2
    assert "measure: expected the sm90 kernel on a GPU that runs it, got 'sm80'" in result.stderr
    assert not picture.exists()


# ---- doctor and the command itself -----------------------------------------------------------------------------------


def test_doctor() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "cpu" in result.stdout and "ragged_prefill" in result.stdout
    report = json.loads(run("doctor", "--json").stdout)
    assert report["ops"] == ["ragged_prefill", "plan_prefill", "merge_states", "gather_latent"]
    assert report["build_problem"] is None and report["devices"][0]["device"] == "cpu"
    assert any(kernel["backend"] == "cpu" and kernel["usable"] for kernel in report["kernels"])
    assert all(kernel["usable"] or kernel["reason"] for kernel in report["kernels"])


def test_doctor_says_why_a_backend_is_or_is_not_chosen() -> None:
    result = run("doctor", "--model", "deepseek-v3", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "prefill backend for deepseek-v3, bfloat16, cpu: NATIVE" in result.stdout
    report = json.loads(run("doctor", "--model", "glm-5", "--dtype", "float64", "--device", "cpu", "--json").stdout)
    assert report["question"] == {"model": "glm-5", "dtype": "float64", "device": "cpu"}
    assert report["prefill_backend"] is None
    backends = {row["backend"]: row for row in report["prefill_backends"]}
    assert list(backends) == ["NATIVE", "FLASH_ATTN", "FLASHINFER", "TRTLLM_RAGGED", "SDPA", "CUSTOM"]
    assert all(row["usable"] == (not row["reasons"]) for row in backends.values())
    assert backends["SDPA"]["reasons"] == [
        "dtype: expected one of torch.bfloat16, torch.float16, torch.float32, got torch.float64"
    ]
    assert [reason.split(":")[0] for reason in backends["TRTLLM_RAGGED"]["reasons"]][:2] == [
        "compute capability", "dtype",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-2"), "model: expected one of"),
        (("--dtype", "flat"), "dtype: expected the name of a torch dtype, got 'flat'"),
        (("--device", "tpu"), "device: expected cpu or cuda, got 'tpu'"),
    ],
)
def test_doctor_names_a_wrong_question(arguments: tuple, message: str) -> None:
    result = run("doctor", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mla_prefill._C", None)
    monkeypatch.delattr("mla_prefill._C", raising=False)
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "expected the compiled module mla_prefill._C" in result.stdout
    result = run("plan", "--lengths", "5", "--out", tmp_path / "plan.png")
    assert result.exit_code == 2
    assert "expected the compiled module mla_prefill._C" in result.stderr


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_import_is_light() -> None:
    """No command-line package, no vLLM, no peers, no CUDA context."""
    result = python(
        "import sys, torch, mla_prefill, mla_prefill.layer, mla_prefill.metadata\n"
        "loaded = {'typer', 'rich', 'matplotlib', 'vllm', 'triton', 'flash_attn', 'flashinfer'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    assert result.returncode == 0, result.stderr


def test_the_command_says_what_it_misses() -> None:
    result = python("import sys; sys.modules['typer'] = None\nfrom mla_prefill.cli import main\nmain()")
    assert result.returncode == 1
    assert "mla-prefill needs the package typer: pip install 'mla-prefill[cli]'" in result.stderr
