"""vLLM's real ``MLAAttention``, metadata builder and ``forward_impl`` with this package's backend in it."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backends.mla.prefill.base", reason="vLLM is not installed: make test-vllm")
from harness import Model, RecordingBackend, Step
from helpers import assert_matches_oracle, assert_same_bits, has_kernel
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

from mla_prefill.backends.base import SplitKey
from mla_prefill.vllm import auto, register
from mla_prefill.vllm.backend import NativeMLAPrefillBackend

# (context, new tokens). The third request's context takes several chunks, the first and last have none.
REQUESTS = [(0, 5), (40, 7), (130, 3), (17, 33), (0, 2)]
PASSES = 8
HEADS = pytest.mark.parametrize("heads", [1, 5, 16])


def chunked(**options: object) -> Model:
    return Model(workspace_rows=64, **options)


@HEADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_layer(heads: int, dtype: torch.dtype) -> None:
    model = chunked(heads=heads, dtype=dtype)
    step = Step(model, REQUESTS)
    metadata = step.build()
    chunks = metadata.prefill.chunked_context.chunks
    assert len(chunks) >= 3 and any(chunk.is_continuation for chunk in chunks)
    assert metadata.prefill.chunked_context.empty_token_slices
    step.check(step.run(metadata), PASSES)

    calls = RecordingBackend.calls
    assert len(calls) == 1 + len(chunks)
    for call in calls:
        assert_matches_oracle(call.inputs, call.out, call.lse)


@pytest.mark.parametrize("dims", [(192, 64, 256), (64, 64, 128)])
def test_dimensions_of_other_models(dims: tuple[int, int, int]) -> None:
    step = Step(chunked(dims=dims), REQUESTS)
    step.check(step.run(step.build()), PASSES)


def test_no_context() -> None:
    step = Step(Model(), [(0, 9), (0, 40)])
    metadata = step.build()
    assert metadata.prefill.chunked_context is None
    step.check(step.run(metadata), 1)


def test_context_in_one_chunk() -> None:
    step = Step(Model(), [(50, 9), (3, 40)])
    metadata = step.build()
    assert len(metadata.prefill.chunked_context.chunks) == 1
    step.check(step.run(metadata), 2)


def test_k_is_not_concatenated() -> None:
    """Both parts of K, and V, are views of what vLLM has already."""
    step = Step(chunked(heads=5), REQUESTS)
    step.run(step.build())
    for call in RecordingBackend.calls:
        assert isinstance(call.key, SplitKey)
        v = call.inputs.v
        assert call.key.k_nope.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert call.key.k_nope.stride() == v.stride() == (5 * 256, 256, 1)
    new_tokens, *contexts = RecordingBackend.calls
    assert new_tokens.key.k_pe.data_ptr() == step.k_pe.data_ptr()
    workspace = step.model.builder.chunked_prefill_workspace
    for call in contexts:
        assert call.key.k_pe.untyped_storage().data_ptr() == workspace.untyped_storage().data_ptr()


def test_other_backends_get_k_in_one_piece() -> None:
    """The same impl object serves a builder whose backend is not ours."""
    model = chunked()
    step = Step(model, REQUESTS)
    step.check(step.run(step.build()), PASSES)
    assert type(model.layer.impl).__name__.startswith("SplitKey")
    builder = model.new_builder()
    builder._prefill_backend = CPUSDPAMLAPrefillBackend(
        num_heads=4, scale=model.scale, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        vllm_config=model.config,
    )  # fmt: skip
    step.check(step.run(step.build(builder)), PASSES)


def test_an_impl_with_a_path_of_its_own_keeps_it() -> None:
    model = chunked()
    calls = []

    class OwnPath(type(model.layer.impl)):
        def forward_mha(self, *args, **kwargs):
            calls.append(1)
            return super().forward_mha(*args, **kwargs)

    model.layer.impl.__class__ = OwnPath
    step = Step(model, REQUESTS)
    step.check(step.run(step.build()), PASSES)
    assert type(model.layer.impl) is OwnPath and calls == [1]
    assert not any(isinstance(call.key, SplitKey) for call in RecordingBackend.calls)


def test_agrees_with_the_backend_of_vllm() -> None:
    steps = [Step(chunked(backend=backend, heads=5), REQUESTS) for backend in (CPUSDPAMLAPrefillBackend, None)]
    outs = [step.run(step.build()) for step in steps]
    assert torch.equal(outs[0], outs[1])  # so vLLM chose its own
    step = Step(chunked(heads=5), REQUESTS)
    torch.testing.assert_close(step.run(step.build()), outs[0], rtol=1e-5, atol=1e-5)


def test_the_layer_owns_the_scale_and_the_builder_a_clone() -> None:
    model = chunked()
    own, cloned = model.layer.prefill_backend, model.builder._prefill_backend
    assert type(own) is type(cloned) is RecordingBackend and own is not cloned
    assert own.scale == cloned.scale == model.scale != 192**-0.5
    step = Step(model, REQUESTS)
    metadata = step.build()
    assert metadata.prefill.prefill_backend is cloned
    with pytest.raises(ValueError, match="expected prepare_metadata before the layers run"):
        own.run_prefill_new_tokens(q=step.q, k=step.q, v=step.q, return_softmax_lse=False)


def test_a_chunk_of_another_builder_is_refused() -> None:
    model = chunked()
    steps = [Step(model, REQUESTS), Step(model, [(90, 4)])]
    metadata = [step.build(builder) for step, builder in zip(steps, (model.builder, model.new_builder()), strict=True)]
    chunk = metadata[0].prefill.chunked_context.chunks[0]
    with pytest.raises(ValueError, match=r"chunk: expected one of the prepared step's 2 context chunks, got chunk 0"):
        metadata[1].prefill.prefill_backend.run_prefill_context_chunk(chunk=chunk, q=None, k=None, v=None)


def test_micro_batches() -> None:
    """Dual-batch overlap: two builders, one layer, two threads."""
    model = chunked()
    steps = [Step(model, REQUESTS[:3]), Step(model, REQUESTS[3:])]
    builders = [model.builder, model.new_builder()]
    alone = [step.run(step.build(builder)).clone() for step, builder in zip(steps, builders, strict=True)]
    for _ in range(20):
        metadata = [step.build(builder) for step, builder in zip(steps, builders, strict=True)]
        outs: list = [None, None]

        def work(index: int, metadata: list = metadata, outs: list = outs) -> None:
            torch.set_default_dtype(model.dtype)
            outs[index] = steps[index].run(metadata[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for out, expected in zip(outs, alone, strict=True):
            assert_same_bits(out, expected)


def test_chosen_without_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", "auto")
    register()
    model = chunked(backend=None, heads=5)
    assert type(model.layer.prefill_backend) is NativeMLAPrefillBackend
    step = Step(model, REQUESTS)
    step.check(step.run(step.build()), PASSES)
    assert type(model.layer.impl).__name__ == "SplitKeyCPUMLAImpl"


def test_left_to_vllm_where_native_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", "auto")
    register()
    monkeypatch.setattr(NativeMLAPrefillBackend, "supported_dtypes", (torch.float16,))
    auto._warn_once.cache_clear()
    model = chunked(backend=None)
    assert type(model.layer.prefill_backend) is CPUSDPAMLAPrefillBackend
    step = Step(model, REQUESTS)
    step.check(step.run(step.build()), PASSES)


@pytest.mark.gpu
@HEADS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("requests", [REQUESTS, [(0, 9), (0, 140)]], ids=["context", "fresh"])
def test_layer_on_a_gpu(heads: int, dtype: torch.dtype, requests: list[tuple[int, int]]) -> None:
    assert has_kernel("ragged_prefill", "cuda")
    model = chunked(heads=heads, dtype=dtype, device="cuda")
    step = Step(model, requests)
    step.check(step.run(step.build()), PASSES)
    for call in RecordingBackend.calls:
        assert isinstance(call.key, SplitKey)
        if call.lse is not None:
            assert_matches_oracle(call.inputs, call.out, call.lse)


@pytest.mark.parametrize("requests", [REQUESTS, [(0, 9), (0, 40)]], ids=["context", "no_context"])
def test_metadata_of_a_step_that_is_over_is_refused(requests: list[tuple[int, int]]) -> None:
    model = chunked()
    first, second = Step(model, requests), Step(model, [(0, 6), (0, 8)])
    second.run(second.build())  # the impls change their class at a builder's first step
    stale, fresh = first.build(), second.build()
    with pytest.raises(ValueError, match=r"metadata: expected the step .* prepared for last .*, got another step"):
        first.run(stale)
    second.check(second.run(fresh), 1)
    first.check(first.run(first.build()), PASSES)
