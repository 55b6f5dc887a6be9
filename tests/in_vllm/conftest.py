"""Tests that import vLLM. They skip where it isn't installed; ``make test-vllm`` installs what they need.

MLA_PREFILL_VLLM_SITE names a folder to import vLLM from instead: the Python files of its wheel, with the ``dist-info``
folder, are enough. vLLM is told that its platform is the CPU, also where the tensors are on a GPU: it then does all but
the attention in torch, on any device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
if site := os.environ.get("MLA_PREFILL_VLLM_SITE"):
    sys.path.insert(0, site)


@pytest.fixture(autouse=True)
def vllm_as_it_was() -> Iterator[None]:
    """No override, environment variable or default dtype of one test reaches the next."""
    from vllm.v1.attention.backends.mla.prefill import registry, selector

    overrides, dtype = dict(registry._MLA_PREFILL_OVERRIDES), torch.get_default_dtype()
    selector._auto_select_mla_prefill_backend.cache_clear()
    yield
    registry._MLA_PREFILL_OVERRIDES.clear()
    registry._MLA_PREFILL_OVERRIDES.update(overrides)
    selector._auto_select_mla_prefill_backend.cache_clear()
    torch.set_default_dtype(dtype)
