"""The adapters, over stand-ins that have the signatures and the quirks of the real libraries.

The stand-ins compute in float64, and answer an empty sequence as the libraries do: with NaN, +inf or a refusal. What is
tested is thus what the adapters do around them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import INF, NAN, Inputs, assert_matches_oracle, assert_same_bits, cu_seqlens
from test_layer import REQUESTS, Model, Step, num_chunks, start
from torch import Tensor

from mla_prefill import reference
from mla_prefill.backends import MLAPrefillBackend, SplitKey, flash_attn, flashinfer
from mla_prefill.backends.flash_attn import FlashAttnPrefillBackend
from mla_prefill.backends.flashinfer import FlashInferPrefillBackend
from mla_prefill.backends.sdpa import SdpaPrefillBackend
from mla_prefill.backends.trtllm_ragged import TrtllmRaggedPrefillBackend
from mla_prefill.forward_context import EngineConfig, ModelConfig

DIMS = (128, 64, 128)
LOG2_E = 1.4426950408889634


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """(out, lse) of [tokens, heads, dim] and [heads, tokens]; a row without keys is NaN, its lse finite."""
    assert q.shape[0] == cu_q[-1] and k.shape[0] == v.shape[0] == cu_k[-1]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    out, lse = reference.ragged_prefill(q, k, v, cu_q, cu_k, scale=scale, causal=causal, return_lse=True)
    empty = torch.isneginf(lse)
    out = out.masked_fill(empty.t().unsqueeze(-1), NAN)
    return out.to(q.dtype), lse.masked_fill(empty, 123.0).float()


def lens(bounds: Tensor) -> Tensor:
    return bounds.diff()


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def flash_attn_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "FA2 wants equal head dims"
    assert v.stride(-1) == 1
    assert max_seqlen_q == lens(cu_seqlens_q).max() and max_seqlen_k == lens(cu_seqlens_k).max()
    assert lens(cu_seqlens_k).min() > 0, "FA2 hangs on an empty key set"
    out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    assert v.shape[-1] == 128, "V is not padded for FA3"
    assert num_splits == 1
    out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return (out, lse.masked_fill(lse == 123.0, INF)) if return_attn_probs else out


def flash_attn_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    return_lse=False,
):  # fmt: skip
    assert qv is None and v.shape[-1] == 128 and num_splits == 1
    out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal)
    return out, lse if return_lse else None


class RaggedWrapper:
    """FlashInfer's BatchPrefillWithRaggedKVCacheWrapper: planned on the host, lse of [tokens, heads] in base 2."""

    made: list[RaggedWrapper] = []  # noqa: RUF012

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        self.workspace, self.backend, self.plans = float_workspace_buffer, backend, 0
        self.made.append(self)

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu", "a device tensor is copied back, and waited for"
        assert num_qo_heads == num_kv_heads and (head_dim_qk, head_dim_vo) == (192, 128) and disable_split_kv
        self.bounds, self.scale, self.causal, self.dtype = (qo_indptr, kv_indptr), sm_scale, causal, q_data_type
        self.plans += 1

    def run(self, q, k, v, *args, out=None, lse=None, return_lse=False):
        assert not args and q.dtype == k.dtype == self.dtype
        assert out is None or out.is_contiguous()
        result, lse = attend(q, k, v, *self.bounds, self.scale, self.causal)
        result = result if out is None else out.copy_(result)
        return (result, (lse * LOG2_E).t().contiguous()) if return_lse else result


def trtllm(
    query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale,
    batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, attention_sinks=None,
    skip_softmax_threshold_scale_factor=None, out=None, lse=None,
):  # fmt: skip
    assert query.is_contiguous(), "the kernel reads q as packed, whatever its strides"
    assert workspace_buffer.dtype == torch.uint8 and not workspace_buffer[:64].any()
    assert bmm2_scale == o_sf_scale == 1.0 and window_left == -1
    q_lens, k_lens = lens(cum_seq_lens_q), lens(cum_seq_lens_kv)
    assert batch_size == len(q_lens) and torch.equal(seq_lens, k_lens)
    assert max_q_len == q_lens.max() and max_kv_len == k_lens.max()
    if q_lens.min() == 0 or k_lens.min() == 0:
        raise ValueError("TRTLLM ragged prefill contains an empty query or KV row")
    result, lse = attend(query, key, value, cum_seq_lens_q, cum_seq_lens_kv, bmm1_scale, is_causal)
    result = result if out is None else out.copy_(result)
    return (result, (lse * LOG2_E).t().contiguous()) if return_lse else result


PEERS: dict[str, tuple[type[MLAPrefillBackend], tuple[int, int] | None, str, dict[str, Callable]]] = {
    "fa2": (FlashAttnPrefillBackend, (8, 0), "flash_attn", {"flash_attn_varlen_func": flash_attn_2}),
    "fa3": (FlashAttnPrefillBackend, (9, 0), "flash_attn_interface", {"flash_attn_varlen_func": flash_attn_3}),
    "fa3-fwd": (FlashAttnPrefillBackend, (9, 0), "fa3_fwd_interface", {"flash_attn_varlen_func": flash_attn_3}),
    "fa4": (FlashAttnPrefillBackend, (10, 0), "flash_attn.cute", {"flash_attn_varlen_func": flash_attn_4}),
    "flashinfer": (
        FlashInferPrefillBackend, (9, 0), "flashinfer", {"BatchPrefillWithRaggedKVCacheWrapper": RaggedWrapper}
    ),
    "trtllm": (
        TrtllmRaggedPrefillBackend, (10, 0), "flashinfer.prefill", {"trtllm_ragged_attention_deepseek": trtllm}
    ),
    "sdpa": (SdpaPrefillBackend, None, "torch", {}),
}  # fmt: skip
MODULES = {
    "flash_attn",
    "flash_attn.cute",
    "flash_attn_interface",
    "fa3_fwd_interface",
    "flashinfer",
    "flashinfer.prefill",
}


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> type[MLAPrefillBackend]:
    """Puts one stand-in where its library would be, and no other library."""
    backend_class, capability, module_name, contents = PEERS[name]
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    if contents:
        module = ModuleType(module_name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module_name, module)
    for user in (flash_attn, flashinfer):
        monkeypatch.setattr(user, "device_capability", lambda device=None: capability)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 4096)
    monkeypatch.setattr(sys.modules["mla_prefill.backends.trtllm_ragged"], "WORKSPACE_BYTES", 4096)
    RaggedWrapper.made.clear()
    return backend_class


@pytest.fixture(params=PEERS)
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[MLAPrefillBackend]:
    return install(monkeypatch, request.param)


# ---- the contract, whatever the library does -------------------------------------------------------------------------


def model_of(adapter: type[MLAPrefillBackend], dtype: torch.dtype = torch.bfloat16, **options: object) -> Model:
    config = EngineConfig(model_config=ModelConfig(dtype))
    return Model(backend=adapter, dims=DIMS, dtype=dtype, config=config, **options)


@pytest.mark.parametrize("workspace_rows", [64, 4096])
def test_layer(adapter: type[MLAPrefillBackend], workspace_rows: int) -> None:
    """In one large chunk a request without context lies between others that have some."""
    step = start(model_of(adapter, workspace_rows=workspace_rows), REQUESTS)
    metadata = step.build()
    assert num_chunks(metadata) == 1 if workspace_rows == 4096 else num_chunks(metadata) > 4
    if workspace_rows == 4096:
        assert 0 in metadata.chunked_context.chunks[0].seq_lens
    step.check(step.run(metadata), passes=2 * 8)  # a pass and a merge for each piece


def prepared(
    adapter: type[MLAPrefillBackend], q_lens: list[int], kv_lens: list[int], dtype: torch.dtype, heads: int = 3
) -> tuple[MLAPrefillBackend, SimpleNamespace]:
    """A backend with one context chunk of all requests prepared."""
    model = model_of(adapter, dtype, heads=heads)
    chunk = SimpleNamespace(
        index=0, request_slice=slice(0, len(q_lens)), token_slice=slice(0, sum(q_lens)),
        query_start_loc=cu_seqlens(q_lens), cu_seq_lens=cu_seqlens(kv_lens), max_query_len=max(q_lens),
        max_seq_len=max(kv_lens), seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
    )  # fmt: skip
    backend = model.layer.prefill_backend.clone()
    backend.prepare_metadata(
        SimpleNamespace(
            query_start_loc=chunk.query_start_loc, max_query_len=max(q_lens), q_data_type=dtype,
            query_lens_cpu=torch.tensor(q_lens, dtype=torch.int32), chunked_context=SimpleNamespace(chunks=[chunk]),
        )
    )  # fmt: skip
    return backend, chunk


def inputs_of(backend: MLAPrefillBackend, q_lens: list[int], kv_lens: list[int], dtype: torch.dtype) -> Inputs:
    """V and k_nope are slices of the projection's output, q of a wider tensor."""
    heads, tokens, rows = backend.num_heads, sum(q_lens), sum(kv_lens)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, heads, 200, generator=generator).to(dtype)[..., :192]
    kv = torch.randn(rows, heads, 256, generator=generator).to(dtype)
    k_pe = torch.randn(rows, 64, generator=generator).to(dtype)
    return Inputs(q, kv[..., :128], kv[..., 128:], cu_seqlens(q_lens), cu_seqlens(kv_lens), backend.scale, False, k_pe)


EMPTY = [
    ([3, 64, 5], [70, 0, 9]),
    ([0, 4, 7], [11, 30, 0]),
    ([5, 0, 0, 6], [0, 8, 0, 0]),
    ([2], [0]),
    ([0, 3], [0, 12]),
]


@pytest.mark.parametrize(("q_lens", "kv_lens"), EMPTY, ids=str)
@pytest.mark.parametrize("heads", [1, 5])
def test_A02_A06_rows_without_keys(adapter, q_lens: list[int], kv_lens: list[int], heads: int) -> None:
    """(0, -inf), whatever the library makes of them, and the others as if those were not there."""
    backend, chunk = prepared(adapter, q_lens, kv_lens, torch.bfloat16, heads)
    inputs = inputs_of(backend, q_lens, kv_lens, torch.bfloat16)
    key = SplitKey(inputs.k, inputs.k_pe)
    out, lse = backend.run_prefill_context_chunk(chunk=chunk, q=inputs.q, k=key, v=inputs.v)
    assert_matches_oracle(inputs, out, lse)
    given = torch.full_like(out, NAN)
    again, _ = backend.run_prefill_context_chunk(chunk=chunk, q=inputs.q, k=key, v=inputs.v, out=given)
    assert again is given
    assert_same_bits(again, out)


@pytest.mark.parametrize("heads", [1, 5, 16])
def test_A18_A19_the_lse_is_natural_and_heads_first(adapter, heads: int) -> None:
    """5 heads and 251 tokens, so that a wrong layout can't fit; as many tokens as heads, where it could."""
    for q_lens, kv_lens in (([251], [40]), ([heads], [33])):
        backend, chunk = prepared(adapter, q_lens, kv_lens, torch.bfloat16, heads)
        inputs = inputs_of(backend, q_lens, kv_lens, torch.bfloat16)
        joined = inputs.with_joined_k()
        out, lse = backend.run_prefill_context_chunk(chunk=chunk, q=joined.q, k=joined.k, v=joined.v)
        assert_matches_oracle(joined, out, lse)


def test_A15_v_is_handed_on_as_it_is_where_it_can_be(adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided and unpadded, but for FlashAttention-2; and the output is as wide as V."""
    seen: list[Tensor] = []
    real = adapter._run

    def spy(self, batch, prepared, q, k, v, return_lse, out):
        seen.append(v)
        return real(self, batch, prepared, q, k, v, return_lse, out)

    monkeypatch.setattr(adapter, "_run", spy)
    backend, chunk = prepared(adapter, [4, 9], [20, 30], torch.bfloat16)
    inputs = inputs_of(backend, [4, 9], [20, 30], torch.bfloat16)
    out, _ = backend.run_prefill_context_chunk(chunk=chunk, q=inputs.q, k=SplitKey(inputs.k, inputs.k_pe), v=inputs.v)
    assert seen[0].data_ptr() == inputs.v.data_ptr() and seen[0].stride() == inputs.v.stride()
    assert out.shape == (13, 3, 128)


def test_A27_clones_share_no_state(adapter) -> None:
    model = model_of(adapter, workspace_rows=64)
    steps = [start(model, REQUESTS), start(model, [(77, 9), (200, 2)])]
    builders = [model.builder, model.new_builder()]
    alone = [step.run(step.build(builder)).clone() for step, builder in zip(steps, builders, strict=True)]
    metadata = [step.build(builder) for step, builder in zip(steps, builders, strict=True)]
    for step, one, expected in zip(steps, metadata, alone, strict=True):
        assert_same_bits(step.run(one), expected)
    backends = [builder.prefill_backend for builder in builders]
    assert type(backends[0]) is type(backends[1]) is adapter
    shared = {id(value) for value in vars(backends[0]).values() if isinstance(value, Tensor | list | dict)}
    assert not shared & {id(value) for value in vars(backends[1]).values() if isinstance(value, Tensor | list | dict)}


@pytest.mark.parametrize("requests", [[], [(0, 0)], [(100, 0), (0, 0)]], ids=str)
def test_A28_no_tokens(adapter, requests: list[tuple[int, int]]) -> None:
    model = model_of(adapter)
    metadata = model.builder.build(
        [new for _, new in requests], [sum(request) for request in requests],
        torch.zeros(len(requests), 7, dtype=torch.int32), torch.empty(0, dtype=torch.int64),
    )  # fmt: skip
    backend, nothing = metadata.prefill_backend, torch.empty(0, 3, 192, dtype=torch.bfloat16)
    out, lse = backend.run_prefill_new_tokens(nothing, nothing, nothing[..., :128], True)
    assert out.shape == (0, 3, 128) and lse.shape == (3, 0)


def test_float16(adapter, request: pytest.FixtureRequest) -> None:
    if "fa3-fwd" in request.node.name:
        with pytest.raises(ImportError, match="FLASH_ATTN: package: expected flash-attn-3 or flash-attn-4 or"):
            model_of(adapter, torch.float16)
        return
    step = start(model_of(adapter, torch.float16), REQUESTS)
    step.check(step.run(), passes=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x.half()}, "q: expected dtype torch.bfloat16, got torch.float16"),
        ({"q": lambda x: x[:-1]}, r"q: expected shape \[7, 3, 192\], got \[6, 3, 192\]"),
        ({"q": lambda x: x[:, :2]}, r"q: expected shape \[7, 3, 192\], got \[7, 2, 192\]"),
        ({"v": lambda x: x[..., :64]}, r"v: expected shape \[9, 3, 128\], got \[9, 3, 64\]"),
        ({"k": lambda x: x[:-2]}, r"k_nope: expected shape \[9, 3, 128\], got \[7, 3, 128\]"),
        ({"k_pe": lambda x: x[:, :32]}, r"k_pe: expected shape \[9, 64\], got \[9, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(adapter, change: dict, message: str) -> None:
    backend, chunk = prepared(adapter, [3, 4], [5, 4], torch.bfloat16)
    inputs = inputs_of(backend, [3, 4], [5, 4], torch.bfloat16)
    inputs = replace(inputs, **{name: function(getattr(inputs, name)) for name, function in change.items()})
    with pytest.raises(ValueError, match=message):
        backend.run_prefill_context_chunk(chunk=chunk, q=inputs.q, k=SplitKey(inputs.k, inputs.k_pe), v=inputs.v)


def test_a_quantised_output_is_refused(adapter) -> None:
    backend, _ = prepared(adapter, [3], [5], torch.bfloat16)
    assert not backend.supports_quant_output(object())
    with pytest.raises(ValueError, match=r"output_scale: expected None \(.* does not quantise its output\), got a"):
        backend.run_prefill_new_tokens(None, None, None, False, output_scale=torch.ones(1))


# ---- single libraries ------------------------------------------------------------------------------------------------


def test_the_best_flash_attn_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "fa3")
    for name in ("fa2", "fa3-fwd", "fa4"):
        _, _, module_name, contents = PEERS[name]
        monkeypatch.setitem(sys.modules, module_name, SimpleNamespace(**contents))
    for capability, expected in (((9, 0), "flash-attn-3"), ((10, 0), "flash-attn-4"), ((8, 6), "flash-attn")):
        monkeypatch.setattr(flash_attn, "device_capability", lambda device=None, c=capability: c)
        assert FlashAttnPrefillBackend(3, 0.1, 512, *DIMS, None)._library.distribution == expected
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(flash_attn, "device_capability", lambda device=None: (9, 4))
    assert FlashAttnPrefillBackend(3, 0.1, 512, *DIMS, None)._library.distribution == "flash-attn"


def test_a_broken_library_is_passed_over_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """AX12: an extension built for another torch fails as it is imported."""
    install(monkeypatch, "fa3")

    class Broken(ModuleType):
        @property
        def flash_attn_varlen_func(self):
            raise OSError("undefined symbol: _ZN3c10")

    monkeypatch.setitem(sys.modules, "flash_attn_interface", Broken("flash_attn_interface"))
    reason = FlashAttnPrefillBackend.missing_dependency()
    assert reason.endswith("or flash-attn, got flash_attn_interface: OSError: undefined symbol: _ZN3c10")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_varlen_func=flash_attn_3))
    assert FlashAttnPrefillBackend.missing_dependency() is None


def test_an_lse_of_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention before 2.6: [batch, heads, longest]."""
    adapter = install(monkeypatch, "fa2")

    def old(*args, **kwargs):
        out, lse, _ = flash_attn_2(*args, **kwargs)
        return out, lse.unsqueeze(0), None

    sys.modules["flash_attn"].flash_attn_varlen_func = old
    backend, chunk = prepared(adapter, [3], [5], torch.bfloat16)
    inputs = inputs_of(backend, [3], [5], torch.bfloat16).with_joined_k()
    with pytest.raises(RuntimeError, match=r"FLASH_ATTN: expected an lse of shape \[3, 3\], got \[1, 3, 3\]"):
        backend.run_prefill_context_chunk(chunk=chunk, q=inputs.q, k=inputs.k, v=inputs.v)


def test_flashinfer_plans_once_per_step_and_keeps_its_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(install(monkeypatch, "flashinfer"), workspace_rows=64)
    step = start(model, REQUESTS)
    for round_ in range(1, 3):
        metadata = step.build()
        for _ in range(2):
            step.run(metadata)
        assert len(RaggedWrapper.made) == 1 + num_chunks(metadata)
        assert {wrapper.plans for wrapper in RaggedWrapper.made} == {round_}
        assert {wrapper.backend for wrapper in RaggedWrapper.made} == {"fa3"}
    assert {wrapper.scale for wrapper in RaggedWrapper.made} == {model.layer.scale}
    model.new_builder().prefill_backend.prepare_metadata(metadata)
    assert len({wrapper.workspace.data_ptr() for wrapper in RaggedWrapper.made}) == 2


def step_of(model: Model, builder: object) -> Step:
    step = start(model, [(0, 4)])
    step.build(builder)
    return step


def test_hyperparameters_are_looked_up_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the constructor: later layers of the model are not registered yet."""
    model = model_of(install(monkeypatch, "flashinfer"))
    calls = []
    real = flashinfer.global_hyperparameters
    monkeypatch.setattr(flashinfer, "global_hyperparameters", lambda config: calls.append(config) or real(config))
    builder = model.new_builder()
    assert calls == [] and builder.prefill_backend._hyperparameters is None
    for _ in range(2):
        step_of(model, builder)
    assert calls == [model.config]
    assert builder.prefill_backend._hyperparameters == (model.layer.scale, 3, "(128, 64, 128)")
    assert model.layer.prefill_backend._hyperparameters is None


def test_layers_that_disagree_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(install(monkeypatch, "flashinfer"))
    layers = model.config.compilation_config.static_forward_context
    layers["norm"] = torch.nn.Identity()  # layers without a prefill backend don't matter
    layers["draft"] = SimpleNamespace(prefill_backend=FlashInferPrefillBackend(3, 0.5, 512, *DIMS, model.config))
    with pytest.raises(ValueError, match=r"static_forward_context: expected draft to have .*scale=0\.1.* like .*, got"):
        step_of(model, model.new_builder())


def test_no_layers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(install(monkeypatch, "flashinfer"))
    layers = model.config.compilation_config.static_forward_context
    builder = model.new_builder()
    layers.clear()
    with pytest.raises(ValueError, match=r"static_forward_context: expected at least one layer .*, got no layers"):
        step_of(model, builder)
    with pytest.raises(ValueError, match="got no layers"):
        flashinfer.global_hyperparameters(None)
    layers["norm"] = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"expected at least one layer with a prefill backend, got \['norm'\]"):
        step_of(model, builder)


def test_sdpa_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lse of long sequences is computed for some rows at a time."""
    sdpa = sys.modules["mla_prefill.backends.sdpa"]
    results = []
    for elements in (1 << 24, 500, 1):
        monkeypatch.setattr(sdpa, "_LSE_ELEMENTS", elements)
        step = start(model_of(SdpaPrefillBackend, torch.float32), REQUESTS)
        results.append(step.run())
        step.check(results[-1], passes=4)
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
