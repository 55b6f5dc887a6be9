from __future__ import annotations

import os

import pytest
import torch
from helpers import GPU_KERNELS, gpu_kernels, has_kernel, use_kernel
from hypothesis import settings

# Derandomized, so that a run in CI says something about the change; HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=80)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Adding one here adds it to every test.
DEVICES = ["cpu", *(pytest.param(f"cuda-{name}", marks=pytest.mark.gpu) for name in GPU_KERNELS)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not has_kernel("ragged_prefill", "cuda"):
        return "this build has no CUDA kernel"
    if not gpu_kernels():
        return "this build has no kernel for compute capability {}.{}".format(*torch.cuda.get_device_capability())
    return None


def pytest_report_header() -> str:
    return f"CUDA tests: {why_no_cuda() or 'on'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_no_cuda():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every device that a test's tensors may live on, a GPU once for each of its kernels."""
    name, _, kernel = request.param.partition("-")
    if kernel:
        use_kernel(kernel, monkeypatch)
    return name


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    """Every input dtype of the device that needs no scales."""
    if device == "cuda" and request.param == torch.float32:
        pytest.skip("float32 is for the CPU; test_cuda.py shows that CUDA refuses it")
    return request.param


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The tests' tensors are small: more threads mostly wait for each other, above all beside pytest-xdist. What
    threads could change has tests of its own."""
    torch.set_num_threads(1)
