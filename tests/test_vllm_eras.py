"""The interfaces of vLLM 0.25 to 0.33, as recorded from their wheels, against this package's backends.

``in_vllm/`` runs the real 0.33 and holds this record against it. Here are the other versions, without vLLM.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import sys
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import INF, NAN, cu_seqlens
from torch import Tensor

import mla_prefill
from mla_prefill.backends import MLAPrefillBackend, NativePrefillBackend, SplitKey
from mla_prefill.backends.sdpa import SdpaPrefillBackend
from mla_prefill.vllm import plugin

SEVEN = ("num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vllm_config")


@dataclass(frozen=True)
class Interface:
    """What one version calls, and the fields of the metadata that it prepares."""

    methods: dict[str, tuple[str, ...]]  # with the names of their parameters
    new_tokens_keywords: tuple[str, ...]  # of vLLM's own call
    context_keywords: tuple[str, ...]
    metadata: tuple[str, ...]
    chunked_context: tuple[str, ...]
    context_chunk: tuple[str, ...] = ()


_METHODS = {
    "get_name": (),
    "supports_compute_capability": ("device_capability",),
    "supports_dtype": ("dtype",),
    "is_available": (),
    "supports_quant_output": ("quant_key",),
    "validate_configuration": ("device_capability", "selector_config"),
    "__init__": SEVEN,
    "clone": (),
    "prepare_metadata": ("prefill_metadata",),
    "run_prefill_new_tokens": ("q", "k", "v", "return_softmax_lse", "out", "output_scale"),
    "run_prefill_context_chunk": ("chunk_idx", "q", "k", "v"),
}
_METHODS_26 = {**_METHODS, "supports_mla_dimensions": ("mla_dimensions",)}
_METHODS_27 = {**_METHODS_26, "supports_out": ()}
_METHODS_28 = {**_METHODS_27, "run_prefill_context_chunk": ("chunk", "q", "k", "v", "out")}
_NEW_TOKENS = ("q", "k", "v", "return_softmax_lse", "out", "output_scale")
_METADATA = ("block_table", "query_start_loc", "max_query_len", "chunked_context", "q_data_type", "output_dtype",
             "prefill_backend")  # fmt: skip
_METADATA_27 = (*_METADATA, "query_lens_cpu", "use_dense_mha", "topk_mask_workspace")
_CONTEXT = ("cu_seq_lens", "starts", "seq_tot", "max_seq_lens", "seq_lens", "workspace", "token_to_seq",
            "chunk_total_token")  # fmt: skip
_CONTEXT_28 = ("context_lens", "workspace", "chunks", "context_lens_list", "empty_token_slices", "dcp_manager")
_CHUNK = ("index", "request_slice", "token_slice", "continuation_token_end", "is_continuation", "num_context_tokens",
          "query_start_loc", "max_query_len", "cu_seq_lens", "starts", "max_seq_len", "seq_lens",
          "token_to_seq")  # fmt: skip
_OLD, _NEW = ("chunk_idx", "q", "k", "v"), ("chunk", "q", "k", "v")
_V28 = Interface(_METHODS_28, _NEW_TOKENS, _NEW, _METADATA_27, _CONTEXT_28, _CHUNK)
_V30 = Interface(_METHODS_28, _NEW_TOKENS, _NEW, _METADATA_27, _CONTEXT_28, (*_CHUNK, "all_rows_active"))

VERSIONS = {
    "0.25.1": Interface(_METHODS, _NEW_TOKENS, _OLD, _METADATA, _CONTEXT),
    "0.26.0": Interface(_METHODS_26, _NEW_TOKENS, _OLD, _METADATA, (*_CONTEXT, "has_empty_context")),
    "0.27.1": Interface(_METHODS_27, _NEW_TOKENS, _OLD, _METADATA_27, (*_CONTEXT, "context_lens", "has_empty_context")),
    "0.28.0": _V28,
    "0.29.0": _V28,
    "0.30.0": _V30,
    "0.31.0": _V30,
    "0.32.0": _V30,
    "0.33.0": _V30,
}
EACH_VERSION = pytest.mark.parametrize("interface", VERSIONS.values(), ids=VERSIONS)
BACKENDS = pytest.mark.parametrize("backend_class", [NativePrefillBackend, SdpaPrefillBackend])

HEADS, DIMS, SCALE = 3, (32, 16, 24), 0.21
REQUESTS = [(0, 5), (40, 7), (130, 3), (17, 33), (0, 2)]  # (context, new tokens)
CHUNK_ROWS = 48


@EACH_VERSION
@BACKENDS
def test_signatures(interface: Interface, backend_class: type[MLAPrefillBackend]) -> None:
    for name, parameters in interface.methods.items():
        assert set(parameters) <= set(inspect.signature(getattr(backend_class, name)).parameters), name
    for name, keywords in (
        ("run_prefill_new_tokens", interface.new_tokens_keywords),
        ("run_prefill_context_chunk", interface.context_keywords),
        ("__init__", SEVEN),
    ):
        inspect.signature(getattr(backend_class, name)).bind(None, **dict.fromkeys(keywords))


def make_backend(backend_class: type[MLAPrefillBackend]) -> MLAPrefillBackend:
    nope, rope, v = DIMS
    return backend_class(
        num_heads=HEADS, scale=SCALE, kv_lora_rank=64, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v,
        vllm_config=None,
    )  # fmt: skip


def metadata_of(interface: Interface, dtype: torch.dtype) -> SimpleNamespace:
    """The step as this version describes it, with no field that it doesn't have."""
    new = torch.tensor([new for _, new in REQUESTS], dtype=torch.int32)
    values = {
        "query_start_loc": cu_seqlens(new.tolist()),
        "max_query_len": int(new.max()),
        "query_lens_cpu": new,
        "q_data_type": dtype,
        "chunked_context": _chunks(interface) if interface.context_chunk else _chunk_matrix(interface),
    }
    return SimpleNamespace(**{name: values.get(name) for name in interface.metadata})


def _chunk_matrix(interface: Interface) -> SimpleNamespace:
    """Up to 0.27: each chunk has CHUNK_ROWS rows of every request, or what is left of them, or none."""
    context = torch.tensor([context for context, _ in REQUESTS])
    starts = torch.arange(0, int(context.max()), CHUNK_ROWS).unsqueeze(1).expand(-1, len(REQUESTS))
    lens = (context - starts).clamp(0, CHUNK_ROWS).to(torch.int32)
    values = {
        "starts": starts,
        "seq_lens": lens,
        "cu_seq_lens": torch.nn.functional.pad(lens.cumsum(1, dtype=torch.int32), (1, 0)),
        "max_seq_lens": lens.max(dim=1).values.tolist(),
        "seq_tot": lens.sum(dim=1).tolist(),
    }
    return SimpleNamespace(**{name: values.get(name) for name in interface.chunked_context})


def _chunks(interface: Interface) -> SimpleNamespace:
    """From 0.28 on: runs of requests that all have rows."""
    bounds = cu_seqlens([new for _, new in REQUESTS]).tolist()
    chunks = []
    for start, rows, requests in ((0, 40, (1, 2)), (0, 96, (2, 3)), (96, 34, (2, 3)), (0, 17, (3, 4))):
        first, last = requests
        values = {
            "index": len(chunks),
            "request_slice": slice(first, last),
            "token_slice": slice(bounds[first], bounds[last]),
            "num_context_tokens": rows,
            "query_start_loc": cu_seqlens([REQUESTS[first][1]]),
            "max_query_len": REQUESTS[first][1],
            "cu_seq_lens": cu_seqlens([rows]),
            "starts": torch.tensor([start]),
            "max_seq_len": rows,
            "seq_lens": torch.tensor([rows], dtype=torch.int32),
        }
        chunks.append(SimpleNamespace(**{name: values.get(name) for name in interface.context_chunk}))
    values = {"chunks": chunks}
    return SimpleNamespace(**{name: values.get(name) for name in interface.chunked_context})


@EACH_VERSION
@BACKENDS
@pytest.mark.parametrize("split", [True, False], ids=["split_k", "joined_k"])
def test_a_step(interface: Interface, backend_class: type[MLAPrefillBackend], split: bool) -> None:
    """A step as this version runs it, against the oracle over whole histories."""
    torch.manual_seed(0)
    nope, rope, v_dim = DIMS
    total = [context + new for context, new in REQUESTS]
    q = torch.randn(sum(new for _, new in REQUESTS), HEADS, nope + rope)
    kv, k_pe = torch.randn(sum(total), HEADS, nope + v_dim), torch.randn(sum(total), rope)
    starts, bounds_q = cu_seqlens(total).tolist(), cu_seqlens([new for _, new in REQUESTS])

    def rows_of(ranges: list[tuple[int, int, int]]) -> tuple[Tensor | SplitKey, Tensor]:
        index = torch.cat([torch.arange(starts[r] + low, starts[r] + high) for r, low, high in ranges])
        k_nope, v = kv[index].split([nope, v_dim], dim=-1)
        if split:
            return SplitKey(k_nope, k_pe[index].unsqueeze(1)), v
        return torch.cat([k_nope, k_pe[index].unsqueeze(1).expand(-1, HEADS, -1)], dim=-1), v

    metadata = metadata_of(interface, q.dtype)
    backend = make_backend(backend_class).clone()
    backend.prepare_metadata(metadata)
    k, v = rows_of([(r, context, context + new) for r, (context, new) in enumerate(REQUESTS)])
    out, lse = backend.run_prefill_new_tokens(
        **dict.fromkeys(interface.new_tokens_keywords) | {"q": q, "k": k, "v": v, "return_softmax_lse": True}
    )
    for chunk_q, ranges, argument in _context_calls(metadata):
        k, v = rows_of(ranges)
        chunk_out, chunk_lse = backend.run_prefill_context_chunk(q=q[chunk_q], k=k, v=v, **argument)
        assert chunk_out.isfinite().all() and not chunk_lse.isnan().any() and not (chunk_lse == INF).any()
        mla_prefill.merge_states(
            out[chunk_q], lse[:, chunk_q], chunk_out, chunk_lse, out=out[chunk_q], lse=lse[:, chunk_q]
        )

    joined = torch.cat([kv[..., :nope], k_pe.unsqueeze(1).expand(-1, HEADS, -1)], dim=-1)
    expected, expected_lse = mla_prefill.reference.ragged_prefill(
        q, joined, kv[..., nope:], bounds_q, cu_seqlens(total), scale=SCALE, causal=True, return_lse=True
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def _context_calls(metadata: SimpleNamespace) -> list[tuple[slice, list[tuple[int, int, int]], dict[str, object]]]:
    """Query rows, (request, first, last) context rows, and the argument that names the chunk."""
    context = metadata.chunked_context
    if hasattr(context, "chunks"):
        return [
            (
                chunk.token_slice,
                [(chunk.request_slice.start, int(chunk.starts), int(chunk.starts) + chunk.num_context_tokens)],
                {"chunk": chunk},
            )
            for chunk in context.chunks
        ]
    return [
        (
            slice(None),
            [(r, int(start), int(start + length)) for r, (start, length) in enumerate(zip(*rows, strict=True))],
            {"chunk_idx": index},
        )
        for index, rows in enumerate(zip(context.starts, context.seq_lens, strict=True))
    ]


@BACKENDS
def test_a_chunk_is_named_once_and_exists(backend_class: type[MLAPrefillBackend]) -> None:
    backend, metadata = make_backend(backend_class), metadata_of(VERSIONS["0.33.0"], torch.float32)
    chunk = metadata.chunked_context.chunks[0]
    with pytest.raises(ValueError, match="expected prepare_metadata before the layers run, got none"):
        backend.run_prefill_context_chunk(chunk=chunk)
    backend.prepare_metadata(metadata)
    with pytest.raises(ValueError, match="chunk: expected either chunk or chunk_idx, got none"):
        backend.run_prefill_context_chunk()
    with pytest.raises(ValueError, match="chunk: expected either chunk or chunk_idx, got both"):
        backend.run_prefill_context_chunk(chunk=chunk, chunk_idx=0)
    with pytest.raises(ValueError, match="chunk_idx: expected one of the prepared step's 4, got 4"):
        backend.run_prefill_context_chunk(chunk_idx=4)
    other = metadata_of(VERSIONS["0.33.0"], torch.float32).chunked_context.chunks[0]
    with pytest.raises(ValueError, match="chunk: expected one of the prepared step's 4 context chunks, got chunk 0 of"):
        backend.run_prefill_context_chunk(chunk=other)


@BACKENDS
def test_out_is_written_in_place(backend_class: type[MLAPrefillBackend]) -> None:
    backend, metadata = make_backend(backend_class), metadata_of(VERSIONS["0.33.0"], torch.float32)
    backend.prepare_metadata(metadata)
    assert backend.supports_out()
    q, v = torch.randn(50, HEADS, 48), torch.randn(50, HEADS, 24)
    out = torch.full((50, HEADS, 30), NAN)
    expected = backend.run_prefill_new_tokens(q, q, v, False)
    for target in (torch.full((50, HEADS, 24), NAN), out[..., 3:27]):
        assert backend.run_prefill_new_tokens(q, q, v, False, out=target) is target
        assert torch.equal(target, expected)
    assert out[..., :3].isnan().all() and out[..., 27:].isnan().all()


# ---- a vLLM that is none of these ------------------------------------------------------------------------------------

_PREFILL = "vllm.v1.attention.backends.mla.prefill"


class _Registry(ModuleType):
    """vLLM's, as far as the plugin sees it. What it was told is in ``registered``."""

    def __init__(self) -> None:
        super().__init__(f"{_PREFILL}.registry")
        members = {"CUSTOM": None, "FLASH_ATTN": "vllm.flash_attn.FlashAttnPrefillBackend"}
        self.MLAPrefillBackendEnum = Enum("MLAPrefillBackendEnum", members)
        self.registered: dict[str, str] = {}
        self.MLAPrefillBackendEnum.is_overridden = lambda member: member.name in self.registered
        self.MLAPrefillBackendEnum.get_path = lambda member: self.registered[member.name]
        self.register_mla_prefill_backend = lambda member, path: self.registered.update({member.name: path})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> _Registry:
    """Stand-ins for the two modules of vLLM that the plugin needs; tests take parts away from them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("backend", "auto", "split_key"):
        # With raising=False what the test imports is forgotten too.
        monkeypatch.setitem(sys.modules, f"mla_prefill.vllm.{name}", None)
        del sys.modules[f"mla_prefill.vllm.{name}"]
    parts = _PREFILL.split(".")
    for end in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:end]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    base = ModuleType(f"{_PREFILL}.base")
    base.MLAPrefillBackend = type("MLAPrefillBackend", (), {"clone": lambda self: self})
    registry = _Registry()
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": "0.99.1"}.__getitem__)
    return registry


def test_the_stand_in_is_enough(registry: _Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests below would show nothing."""
    monkeypatch.setenv("MLA_PREFILL_VLLM", "auto")
    plugin.register()
    assert registry.registered == {"CUSTOM": plugin.BACKEND, "FLASH_ATTN": plugin.DEFAULTS["FLASH_ATTN"]}


def take_away(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module and what is in it, or (behind a colon) an attribute of one."""
    module, _, attribute = path.partition(":")
    if attribute:
        *owners, name = attribute.split(".")
        monkeypatch.delattr(reduce(getattr, owners, sys.modules[module]), name)
        return
    for name in list(sys.modules):
        if name == module or name.startswith(f"{module}."):
            monkeypatch.setitem(sys.modules, name, None)  # importing it is a ModuleNotFoundError


@pytest.mark.parametrize("mode", ["", "auto"])
@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("vllm", "ModuleNotFoundError: .*vllm"),
        (_PREFILL, r"ModuleNotFoundError: .*mla\.prefill"),
        (f"{_PREFILL}.base", r"ModuleNotFoundError: .*mla\.prefill\.base"),
        (f"{_PREFILL}.registry", r"ModuleNotFoundError: .*mla\.prefill\.registry"),
        (f"{_PREFILL}.base:MLAPrefillBackend", "ImportError: cannot import name 'MLAPrefillBackend'"),
        (f"{_PREFILL}.base:MLAPrefillBackend.clone", "AttributeError: .* has no attribute 'clone'"),
        (f"{_PREFILL}.registry:MLAPrefillBackendEnum", "ImportError: cannot import name"),
        (f"{_PREFILL}.registry:MLAPrefillBackendEnum.is_overridden", "AttributeError: .*is_overridden"),
        (f"{_PREFILL}.registry:register_mla_prefill_backend", "ImportError: cannot import name"),
    ],
    ids=lambda value: value.removeprefix(f"{_PREFILL}.") if " " not in value else "",
)
def test_another_interface_is_one_warning(
    path: str,
    found: str,
    mode: str,
    registry: _Registry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM runs the entry point in every process, whatever the model: an exception would end them all."""
    take_away(path, monkeypatch)
    monkeypatch.setenv("MLA_PREFILL_VLLM", mode)
    plugin.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    expected = r"mla_prefill: expected the MLA prefill backends of vLLM 0\.25 to 0\.33, got vLLM 0\.99\.1 "
    assert re.match(rf"{expected}\({found}.*\): nothing is registered$", message), message
    assert registry.registered == {}


def test_an_unknown_mode_stays_an_error(registry: _Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", "nonsense")
    with pytest.raises(ValueError, match="MLA_PREFILL_VLLM: expected auto or custom, got 'nonsense'"):
        plugin.register()
    assert registry.registered == {}


@pytest.mark.parametrize(
    "vllm_config", [None, SimpleNamespace(), SimpleNamespace(compilation_config=SimpleNamespace())], ids=str
)
def test_a_config_without_layers_leaves_k_in_one_piece(
    vllm_config: object, registry: _Registry, caplog: pytest.LogCaptureFixture
) -> None:
    """A step runs all the same: the interface hands over K as a tensor."""
    backend_class = importlib.import_module("mla_prefill.vllm.backend").NativeMLAPrefillBackend
    backend = make_backend(backend_class)
    backend.vllm_config = vllm_config
    metadata = metadata_of(VERSIONS["0.33.0"], torch.float32)
    for _ in range(2):
        backend.prepare_metadata(metadata)
    assert len(caplog.records) == 1 and "vLLM concatenates K" in caplog.text
    q, v = torch.randn(50, HEADS, 48), torch.randn(50, HEADS, 24)
    assert backend.run_prefill_new_tokens(q, q, v, False).isfinite().all()


def test_metadata_with_no_more_than_lengths_will_do() -> None:
    """Fields that are there for speed alone may go: the first layer then makes the plan, of its q."""
    metadata = metadata_of(VERSIONS["0.33.0"], torch.float32)
    bare = SimpleNamespace(
        query_start_loc=metadata.query_start_loc, max_query_len=metadata.max_query_len, chunked_context=None
    )
    q, v = torch.randn(50, HEADS, 48), torch.randn(50, HEADS, 24)
    outs = []
    for step in (metadata, bare):
        backend = make_backend(NativePrefillBackend)
        backend.prepare_metadata(step)
        outs.append(backend.run_prefill_new_tokens(q, q, v, False))
    assert torch.equal(*outs)
