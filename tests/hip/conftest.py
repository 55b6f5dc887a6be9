from __future__ import annotations

import pytest
import torch
from kernels import missing_tools


@pytest.fixture(autouse=True, scope="session")
def toolchain() -> None:
    if missing := missing_tools():
        pytest.skip(f"needs LLVM 22 for AMD GPUs, {', '.join(missing)} not found (apt: clang-22 lld-22 llvm-22)")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
