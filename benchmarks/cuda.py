"""mla_prefill on a GPU against the attention libraries installed there, bf16, in the same run."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import CUDA_CASES, Inputs, flops
from benchmarks.options import add_common, head_dims, name_list
from benchmarks.peers import Ours, Peer
from benchmarks.peers_cuda import FLASH_ATTENTION_3, ConcatK, Fa4, FlashInfer, TorchFlash, TorchMemEff
from benchmarks.peers_cudnn import Cudnn
from benchmarks.report import chart, figures_table, progress, summary_table
from benchmarks.timer import Run, device_seconds, host_seconds
from tests.cases import MLA, Case

OURS = [
    Ours("ours", planned=True),
    Ours("ours, one K", planned=True, split_k=False),
    Ours("ours, plan in the clock"),
]
PEERS = {
    peer.name: peer
    for peer in (
        *FLASH_ATTENTION_3,
        FlashInfer("flashinfer", "fa3"),
        FlashInfer("flashinfer-fa2", "fa2"),
        Cudnn(),
        Fa4(),
        TorchMemEff(),
        TorchFlash(),
    )
}
QUICK = {"peers": ["fa3"], "rounds": 7}
HOST_CALLS = 30  # few enough that their kernels never fill the launch queue
# Relative error of out in norm, and absolute error of lse: what two right kernels with P in bf16 stay well under.
TOLERANCES = (1e-2, 5e-3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, CUDA_CASES)
    parser.add_argument("--peers", type=name_list(PEERS), metavar="P,Q", help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--rounds", type=int, help="default: 45")
    parser.add_argument("--kernel", metavar="NAME", help="of ours, forced: sm90 or sm80; default: what the op chooses")
    parser.add_argument(
        "--dims", type=head_dims, default=MLA, metavar="NOPE,ROPE,V", help="head dims, default: 128,64,128"
    )
    parser.add_argument("--quick", action="store_true", help="without --peers only fa3, without --rounds 7")


def run(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks cuda: expected a CUDA device, got none")
    if options.kernel:
        os.environ["MLA_PREFILL_FORCE"] = options.kernel
    defaults = QUICK if options.quick else {"peers": list(PEERS), "rounds": 45}
    rounds = options.rounds or defaults["rounds"]
    runners: list[Peer] = [*OURS, ConcatK()]
    report = {
        "device": _device(),
        "rounds": rounds,
        "kernel": options.kernel,
        "dims": options.dims,
        "versions": {},
        "unavailable": {},
        "cases": [],
    }
    print(json.dumps(report["device"]))
    for peer in [OURS[0], *(PEERS[name] for name in options.peers or defaults["peers"])]:
        if reason := peer.unavailable():
            report["unavailable"][peer.name] = _first_line(reason)
            print(f"{peer.name}: not measured: {_first_line(reason)}")
        else:
            report["versions"][peer.name] = peer.version()
            if peer not in runners:
                runners.append(peer)
    print(json.dumps(report["versions"]), flush=True)

    report["ceilings"] = {key: [value] for key, value in _ceilings(rounds).items()}
    for name in options.case:
        report["cases"].append(_measure(replace(CUDA_CASES[name], head_dims=options.dims), runners, rounds))
        print(progress(report["cases"][-1]), flush=True)
        _write(report, options.out)  # a run cut short keeps what it has
        gc.collect()
        torch.cuda.empty_cache()
    for key, value in _ceilings(rounds).items():
        report["ceilings"][key].append(value)
    _write(report, options.out)
    if options.out and (reason := chart(report, options.out / "cuda.png")):
        print(f"no chart: {reason}")
    print("\n" + figures_table(report) + "\n\n" + summary_table(report))


def _measure(case: Case, runners: list[Peer], rounds: int) -> dict[str, object]:
    """One case: every runner is checked against the first, then all are timed together.

    A runner that fails stands in ``failed`` with its reason.
    """
    row = {
        "case": case.name,
        "lengths": f"{case.notes} {'causal' if case.causal else 'full'}, H={case.num_heads}",
        "tflop": flops(case) / 1e12,
        "gpu_before": _gpu_state(),
        "figures": {},
        "failed": {},
    }
    inputs = Inputs.of(case, torch.bfloat16, "cuda")
    runs, host, expected = {}, {}, None
    for runner in runners:
        figure = {"kind": runner.kind}
        try:
            call = runner.prepare(inputs)
            if runner.kind != "glue":
                state = runner.state(call())
                torch.cuda.synchronize()
                if expected is None and runner.kind == "ours":
                    expected = state
                elif expected is not None:
                    figure |= _compare(state, expected)
                del state
            host[runner.name] = host_seconds(call, HOST_CALLS)
        except Exception as error:  # a library may raise anything, and must not stop the run
            row["failed"][runner.name] = _first_line(f"{type(error).__name__}: {error}")
        else:
            runs[runner.name] = call
            row["figures"][runner.name] = figure
    del expected
    try:
        timed = device_seconds(runs, rounds, host)
    except Exception as error:
        timed, row["figures"] = {}, {}
        row["failed"]["all, while timed"] = _first_line(f"{type(error).__name__}: {error}")
    for name, seconds in timed.items():
        milliseconds = [1e3 * value for value in seconds]
        median = statistics.median(milliseconds)
        figure = row["figures"][name]
        figure |= {"ms": median, "ms_min": min(milliseconds), "ms_max": max(milliseconds), "host_us": 1e6 * host[name]}
        if figure["kind"] != "glue":
            figure["tflops"] = row["tflop"] / median * 1e3
    row["gpu_after"] = _gpu_state()
    return row


def _compare(state: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> dict[str, object]:
    """``agrees`` is false where a value is NaN too."""
    (out, lse), (expected_out, expected_lse) = state, expected
    difference = out.float() - expected_out.float()
    error = float(difference.norm() / expected_out.float().norm())
    found = {"max_abs_diff": float(difference.abs().max()), "relative_error": error}
    agrees = error < TOLERANCES[0]
    if lse is not None and expected_lse is not None and lse.shape == expected_lse.shape:
        found["lse_max_abs_diff"] = float((lse - expected_lse).abs().max())
        agrees = agrees and found["lse_max_abs_diff"] < TOLERANCES[1]
    return found | {"agrees": agrees}


def _ceilings(rounds: int) -> dict[str, float]:
    """What the card gives now: an 8192^3 bf16 matmul, and a copy of 2 GiB counted as read and written."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)

    def median(call: Run) -> float:
        return statistics.median(device_seconds({"": call}, rounds, {"": host_seconds(call, 3)})[""])

    return {
        "matmul_tflops": 2 * 8192**3 / median(lambda: a @ b) / 1e12,
        "copy_tb_per_s": 2 * source.nbytes / median(lambda: target.copy_(source)) / 1e12,
    }


def _device() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _gpu_state() -> dict[str, str]:
    """SM clock, power and temperature by nvidia-smi; empty where it does not answer."""
    fields = ("clocks.sm", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in answer.split(",")), strict=False))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _write(report: dict[str, object], folder: Path | None) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cuda.json").write_text(json.dumps(report, indent=1))
