"""The record of vLLM's interface against the real one, and its context chunks against ours."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backends.mla.prefill.base", reason="vLLM is not installed: make test-vllm")
from hypothesis import given
from hypothesis import strategies as st
from test_vllm_eras import VERSIONS
from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata, plan_mla_context_chunks
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

import mla_prefill
from mla_prefill.forward_context import EngineConfig
from mla_prefill.vllm.backend import NativeMLAPrefillBackend


def field_names(dataclass: type) -> set[str]:
    return {field.name for field in dataclasses.fields(dataclass)}


def test_the_record_of_this_version() -> None:
    interface = VERSIONS[version("vllm")]
    for name, parameters in interface.methods.items():
        real = [p for p in inspect.signature(getattr(MLAPrefillBackend, name)).parameters if p != "self"]
        assert tuple(real) == parameters, name
    assert set(interface.metadata) == field_names(MLACommonPrefillMetadata)
    assert set(interface.chunked_context) == field_names(MLACommonPrefillMetadata.ChunkedContextMetadata)
    assert set(interface.context_chunk) <= field_names(MLACommonPrefillMetadata.ContextChunk)


def test_nothing_that_vllm_asks_of_a_backend_is_its_default() -> None:
    """Every public name of vLLM's class is this package's own, so a new one shows up here."""
    for name, member in vars(MLAPrefillBackend).items():
        if not name.startswith("_") or name == "__init__":
            assert getattr(NativeMLAPrefillBackend, name) is not member, name


@given(
    st.lists(st.integers(0, 300), max_size=8),
    st.integers(1, 12),
    st.sampled_from([1, 16, 64]),
)
def test_context_chunks_agree_with_those_of_vllm(context_lens: list[int], blocks: int, block_size: int) -> None:
    """Both pack greedily and split at blocks; ours keep a request without context inside a run, vLLM's end there."""
    rows = blocks * block_size
    theirs = plan_mla_context_chunks(context_lens, rows, rows, block_size, lambda rows: rows)
    pieces = [
        [(chunk.request_start + i, start, length) for i, (start, length) in enumerate(zip(*spans, strict=True))]
        for chunk in theirs
        for spans in [(chunk.starts, chunk.seq_lens)]
    ]
    ours = [
        [
            (chunk.request_slice.start + i, start, length)
            for i, (start, length) in enumerate(zip(chunk.starts, chunk.seq_lens, strict=True))
            if length
        ]
        for chunk in mla_prefill.plan_context_chunks(context_lens, workspace_rows=rows, block_size=block_size)
    ]
    if 0 not in context_lens:
        assert ours == pieces
    for plan in (ours, pieces):
        assert sum(length for chunk in plan for *_, length in chunk) == sum(context_lens)
        assert all(sum(length for *_, length in chunk) <= rows for chunk in plan)
    assert len(ours) <= len(pieces)


@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("lens", [[1], [3, 70, 1, 128], [64, 64]], ids=str)
def test_same_results_as_vllms_cpu_backend(heads: int, lens: list[int]) -> None:
    torch.manual_seed(0)
    dims = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    tokens = sum(lens)
    metadata = MLACommonPrefillMetadata(
        block_table=torch.empty(0),
        query_start_loc=starts,
        max_query_len=max(lens),
        q_data_type=torch.float32,
        query_lens_cpu=torch.tensor(lens, dtype=torch.int32),
    )
    q, kv = torch.randn(tokens, heads, 192), torch.randn(tokens, heads, 256)
    k = torch.cat([kv[..., :128], torch.randn(tokens, 1, 64).expand(-1, heads, -1)], dim=-1)
    results = []
    for backend_class in (NativeMLAPrefillBackend, CPUSDPAMLAPrefillBackend):
        backend = backend_class(
            num_heads=heads, scale=0.1352, kv_lora_rank=512, vllm_config=EngineConfig(), **vars(dims)
        ).clone()
        backend.prepare_metadata(metadata)
        results.append(backend.run_prefill_new_tokens(q=q, k=k, v=kv[..., 128:], return_softmax_lse=True))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
