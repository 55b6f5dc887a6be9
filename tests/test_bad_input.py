"""Bad input: each message names the argument, what was expected and what came, and nothing has been written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import Case
from helpers import CANARY, INF, NAN, assert_same_bits, int32, make_inputs

import mla_prefill

Arguments = dict[str, object]
RAGGED = Case("ragged", (4, 3), (6, 5), 2, True)


@dataclass(frozen=True)
class Bad:
    """One change to good arguments. ``expected`` and ``got`` are what the message must say beside the argument."""

    argument: str
    what: str
    change: Callable[[Arguments], object]
    expected: str
    got: str = ""

    def __str__(self) -> str:
        return f"{self.argument}-{self.what}"


def put(name: str, value: object) -> Callable[[Arguments], object]:
    return lambda arguments: arguments.update({name: value})


def turn(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], object]:
    return lambda arguments: arguments.update({name: function(arguments[name])})


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def to_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def assert_refused(function: Callable, arguments: Arguments, bad: Bad) -> None:
    bad.change(arguments)
    outputs = [arguments[name] for name in ("out", "lse") if isinstance(arguments.get(name), torch.Tensor)]
    outputs = [x for x in outputs if not x.is_meta]
    before = [x.clone() for x in outputs]
    # Several arguments can be the odd one out (two dtypes that differ); the message starts with the changed one.
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        function(**arguments)
    message = str(caught.value)
    assert re.match(rf"{bad.argument}: expected .*{bad.expected}.*, got .*{bad.got}", message), message
    for x, was in zip(outputs, before, strict=True):
        assert_same_bits(x, was)


def cases(*rows: Bad) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bad", rows, ids=str)


# ---- ragged_prefill --------------------------------------------------------------------------------------------------


def prefill_arguments(device: str = "cpu") -> Arguments:
    """q [7, 2, 192], k [11, 2, 128], k_pe [11, 64], v [11, 2, 128], bfloat16."""
    inputs = make_inputs(RAGGED, torch.bfloat16, device)
    return {
        **inputs.kwargs(),
        "out": torch.full(inputs.out_shape, CANARY, dtype=torch.bfloat16, device=device),
        "lse": torch.full(inputs.lse_shape, CANARY, device=device),
    }


@cases(
    Bad("q", "float64", turn("q", torch.Tensor.double), "float32, bfloat16, float16", "float64"),
    Bad("q", "int32", turn("q", torch.Tensor.int), "float32, bfloat16, float16", "int32"),
    Bad("q", "matrix", turn("q", lambda x: x[:, 0]), "3-D", r"\[7, 192\]"),
    Bad("q", "vector", turn("q", lambda x: x[:, 0, 0]), "3-D", r"\[7\]"),
    Bad("q", "no_heads", turn("q", lambda x: x[:, :0]), "at least one head", r"\[7, 0, 192\]"),
    Bad("q", "no_elements", turn("q", lambda x: x[..., :0]), "one element per head", r"\[7, 2, 0\]"),
    Bad("q", "last_stride", turn("q", column_major), "last stride of 1", r"\[384, 1, 2\]"),
    Bad("k", "other_dtype", turn("k", torch.Tensor.half), "bfloat16", "float16"),
    Bad("k", "matrix", turn("k", lambda x: x[:, 0]), "3-D", r"\[11, 128\]"),
    Bad("k", "other_heads", turn("k", lambda x: x[:, :1]), "2 heads", r"\[11, 1, 128\]"),
    Bad("k", "too_wide_beside_k_pe", turn("k", lambda x: torch.cat([x, x], -1)), "1 to 191", r"\[11, 2, 256\]"),
    Bad("k", "too_narrow_without_k_pe", put("k_pe", None), "192", r"\[11, 2, 128\]"),
    Bad("k", "last_stride", turn("k", column_major), "last stride of 1", r"\[256, 1, 2\]"),
    Bad("k", "device", turn("k", to_meta), "'s device", "meta"),
    Bad("v", "other_dtype", turn("v", torch.Tensor.float), "bfloat16", "float32"),
    Bad("v", "matrix", turn("v", lambda x: x[:, 0]), "3-D", r"\[11, 128\]"),
    Bad("v", "other_rows", turn("v", lambda x: x[:10]), r"11, 2", r"\[10, 2, 128\]"),
    Bad("v", "other_heads", turn("v", lambda x: x[:, :1]), r"11, 2", r"\[11, 1, 128\]"),
    Bad("v", "no_elements", turn("v", lambda x: x[..., :0]), "at least 1", r"\[11, 2, 0\]"),
    Bad("v", "last_stride", turn("v", column_major), "last stride of 1", r"\[256, 1, 2\]"),
    Bad("v", "device", turn("v", to_meta), "'s device", "meta"),
    Bad("k_pe", "other_dtype", turn("k_pe", torch.Tensor.half), "bfloat16", "float16"),
    Bad("k_pe", "too_narrow", turn("k_pe", lambda x: x[:, :32]), r"\[11, 64\]", r"\[11, 32\]"),
    Bad("k_pe", "too_wide", turn("k_pe", lambda x: torch.cat([x, x], -1)), r"\[11, 64\]", r"\[11, 128\]"),
    Bad("k_pe", "other_rows", turn("k_pe", lambda x: x[:10]), r"\[11, 64\]", r"\[10, 64\]"),
    Bad("k_pe", "per_head", turn("k_pe", lambda x: x.unsqueeze(1).repeat(1, 2, 1)), r"\[11, 1, 64\]", r"\[11, 2, 64\]"),
    Bad("k_pe", "vector", turn("k_pe", lambda x: x[:, 0]), r"\[11, 64\]", r"\[11\]"),
    Bad("k_pe", "last_stride", turn("k_pe", column_major), "last stride of 1", r"\[1, 11\]"),
    Bad("k_pe", "device", turn("k_pe", to_meta), "'s device", "meta"),
    Bad("scale", "nan", put("scale", NAN), "finite", "nan"),
    Bad("scale", "inf", put("scale", INF), "finite", "inf"),
    Bad("scale", "inf_as_float32", put("scale", 3.5e38), "finite", r"3.5e\+38"),
    Bad("scale", "inf_as_float32_below", put("scale", -1e300), "finite", r"-1e\+300"),
    Bad("scale", "inf_times_log2e", put("scale", 3e38), r"times log2\(e\)", r"3e\+38"),
    Bad("max_seqlen_q", "negative", put("max_seqlen_q", -1), "0 or above", "-1"),
    Bad("max_seqlen_k", "negative", put("max_seqlen_k", -7), "0 or above", "-7"),
    Bad("out", "other_dtype", turn("out", torch.Tensor.float), "bfloat16", "float32"),
    Bad("out", "too_narrow", turn("out", lambda x: x[..., :64]), r"\[7, 2, 128\]", r"\[7, 2, 64\]"),
    Bad("out", "padded_to_qk_A15", turn("out", lambda x: torch.cat([x, x], -1)[..., :192]), r"\[7, 2, 128\]", "192"),
    Bad("out", "other_rows", turn("out", lambda x: x[:6]), r"\[7, 2, 128\]", r"\[6, 2, 128\]"),
    Bad("out", "flat", turn("out", lambda x: x.flatten(1)), r"\[7, 2, 128\]", r"\[7, 256\]"),
    Bad("out", "last_stride", turn("out", column_major), "last stride of 1", r"\[256, 1, 2\]"),
    Bad("out", "overlapping", turn("out", lambda x: x[:1].expand(7, -1, -1)), "share memory", r"\[0, 128, 1\]"),
    Bad("out", "device", turn("out", to_meta), "'s device", "meta"),
    Bad("lse", "other_dtype", turn("lse", torch.Tensor.double), "float32", "float64"),
    Bad("lse", "tokens_by_heads_A18", turn("lse", torch.Tensor.t), r"\[2, 7\]", r"\[7, 2\]"),
    Bad("lse", "vector", turn("lse", torch.Tensor.flatten), r"\[2, 7\]", r"\[14\]"),
    Bad("lse", "overlapping", turn("lse", lambda x: x[:1].expand(2, -1)), "share memory", r"\[0, 1\]"),
    Bad("lse", "device", turn("lse", to_meta), "'s device", "meta"),
    Bad("q_descale", "without_float8", put("q_descale", torch.ones(1)), "None for bfloat16", ""),
    Bad("k_descale", "without_float8", put("k_descale", torch.ones(1)), "None for bfloat16", ""),
    Bad("v_descale", "without_float8", put("v_descale", torch.ones(1)), "None for bfloat16", ""),
)
def test_ragged_prefill(bad: Bad, device: str) -> None:
    assert_refused(mla_prefill.ragged_prefill, prefill_arguments(device), bad)


def bad_cu_seqlens(name: str) -> list[Bad]:
    return [
        Bad(name, "int64", turn(name, torch.Tensor.long), "int32", "int64"),
        Bad(name, "float32", turn(name, torch.Tensor.float), "int32", "float32"),
        Bad(name, "matrix", turn(name, lambda x: x.reshape(1, -1)), "batch", r"\[1, 3\]"),
        Bad(name, "strided", turn(name, lambda x: x.repeat_interleave(2)[::2]), "stride of 1", r"\[2\]"),
        Bad(name, "device", turn(name, to_meta), "'s device", "meta"),
        Bad(name, "decreasing", turn(name, lambda x: x.flip(0)), "never decrease", "after"),
        Bad(name, "negative", turn(name, lambda x: x - 1), "first entry of 0 or above", "-1"),
        Bad(name, "past_the_rows", turn(name, lambda x: x + 1), "last entry of at most", ""),
        Bad(
            name,
            "overflowing",
            turn(name, lambda x: x.clamp(max=1) * (2**31 - 1)),
            "last entry of at most",
            "2147483647",
        ),
    ]


def skip_values(bad: Bad, device: str) -> None:
    if device != "cpu" and bad.what in ("decreasing", "negative", "past_the_rows", "overflowing"):
        pytest.skip("values on a GPU can't be checked without waiting for it")


@cases(*bad_cu_seqlens("cu_seqlens_q"), *bad_cu_seqlens("cu_seqlens_k"))
def test_ragged_prefill_cu_seqlens(bad: Bad, device: str) -> None:
    skip_values(bad, device)
    assert_refused(mla_prefill.ragged_prefill, prefill_arguments(device), bad)


@cases(
    Bad("cu_seqlens_q", "no_entries", put("cu_seqlens_q", int32([])), "at least one", ""),
    Bad("cu_seqlens_k", "no_entries", put("cu_seqlens_k", int32([])), r"\[3\]", r"\[0\]"),
    Bad("cu_seqlens_k", "one_sequence_less", put("cu_seqlens_k", int32([0, 11])), r"\[3\]", r"\[2\]"),
    Bad("cu_seqlens_k", "one_sequence_more", put("cu_seqlens_k", int32([0, 1, 2, 11])), r"\[3\]", r"\[4\]"),
)
def test_ragged_prefill_batches_that_differ(bad: Bad) -> None:
    assert_refused(mla_prefill.ragged_prefill, prefill_arguments(), bad)


@cases(
    Bad("q_descale", "float64", put("q_descale", torch.ones(1, dtype=torch.float64)), "float32", "float64"),
    Bad("k_descale", "per_token", put("k_descale", torch.ones(11)), r"one per head: \[2\]", r"\[11\]"),
    Bad("v_descale", "matrix", put("v_descale", torch.ones(2, 1)), r"one per head: \[2\]", r"\[2, 1\]"),
    Bad("v_descale", "device", put("v_descale", torch.ones(1, device="meta")), "cpu", "meta"),
    Bad("out", "float8", turn("out", lambda x: x.to(torch.float8_e4m3fn)), "bfloat16", "float8_e4m3fn"),
)
def test_ragged_prefill_float8(bad: Bad) -> None:
    arguments = prefill_arguments()
    for name in ("q", "k", "v", "k_pe"):
        arguments[name] = arguments[name].to(torch.float8_e4m3fn)
    assert_refused(mla_prefill.ragged_prefill, arguments, bad)


@cases(
    Bad("out", "missing", put("out", None), "accumulate=True", "None"),
    Bad("lse", "missing", put("lse", None), "accumulate=True", "None"),
)
def test_accumulate_needs_a_state(bad: Bad) -> None:
    assert_refused(mla_prefill.ragged_prefill, {**prefill_arguments(), "accumulate": True}, bad)


@pytest.mark.parametrize("missing", ["scale", "causal"])
def test_A20_scale_and_causal_have_no_default(missing: str) -> None:
    arguments = prefill_arguments()
    del arguments[missing]
    with pytest.raises(TypeError, match=missing):
        mla_prefill.ragged_prefill(**arguments)
    with pytest.raises(TypeError, match=missing):
        mla_prefill.reference.ragged_prefill(**{k: v for k, v in arguments.items() if k not in ("out", "lse")})


def test_AX13_options_are_keyword_only() -> None:
    """Two packages of one API swapped max_q and cu_k; nothing here can be swapped silently."""
    tensors = {
        mla_prefill.ragged_prefill: ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"],
        mla_prefill.reference.ragged_prefill: ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"],
        mla_prefill.plan_prefill: ["cu_seqlens_q", "cu_seqlens_k"],
        mla_prefill.merge_states: ["out_a", "lse_a", "out_b", "lse_b"],
        mla_prefill.gather_latent: ["cache", "block_table", "cu_seqlens", "starts"],
    }
    for function, names in tensors.items():
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == names


# ---- plan_prefill ----------------------------------------------------------------------------------------------------


def plan_arguments(device: str = "cpu") -> Arguments:
    bounds = {"cu_seqlens_q": int32([0, 4, 7], device), "cu_seqlens_k": int32([0, 6, 11], device)}
    return {**bounds, "num_heads": 2, "causal": True}


@cases(
    *(
        bad
        for bad in (*bad_cu_seqlens("cu_seqlens_q"), *bad_cu_seqlens("cu_seqlens_k"))
        if bad.what not in ("past_the_rows", "overflowing")  # of tensors that a plan doesn't see
        and str(bad) != "cu_seqlens_q-device"  # the device that cu_seqlens_k is held against
    ),
    Bad("cu_seqlens_q", "no_entries", put("cu_seqlens_q", int32([])), "at least one", ""),
    Bad("cu_seqlens_k", "one_sequence_less", put("cu_seqlens_k", int32([0, 11])), r"\[3\]", r"\[2\]"),
    Bad("num_heads", "zero", put("num_heads", 0), "1 or above", "0"),
    Bad("num_heads", "negative", put("num_heads", -3), "1 or above", "-3"),
    Bad("head_dims", "no_nope", put("head_dims", (0, 64, 128)), "nope >= 1", r"\(0, 64, 128\)"),
    Bad("head_dims", "no_v", put("head_dims", (128, 64, 0)), "v >= 1", r"\(128, 64, 0\)"),
    Bad("head_dims", "negative_rope", put("head_dims", (128, -1, 128)), "rope >= 0", r"\(128, -1, 128\)"),
    Bad("dtype", "float64", put("dtype", torch.float64), "float32, bfloat16", "float64"),
    Bad("max_tokens_q", "negative", put("max_tokens_q", -1), "0 or above", "-1"),
)
def test_plan_prefill(bad: Bad, device: str) -> None:
    skip_values(bad, device)
    assert_refused(mla_prefill.plan_prefill, plan_arguments(device), bad)


# ---- merge_states ----------------------------------------------------------------------------------------------------


def merge_arguments() -> Arguments:
    generator = torch.Generator().manual_seed(0)
    arguments: Arguments = {}
    for side in ("a", "b"):
        arguments[f"out_{side}"] = torch.randn(7, 2, 16, generator=generator).bfloat16()
        arguments[f"lse_{side}"] = torch.randn(2, 7, generator=generator)
    return {**arguments, "out": torch.full((7, 2, 16), CANARY).bfloat16(), "lse": torch.full((2, 7), CANARY)}


def bad_out(name: str) -> list[Bad]:
    return [
        Bad(name, "other_dtype", turn(name, torch.Tensor.half), "bfloat16", "float16"),
        Bad(name, "other_rows", turn(name, lambda x: x[:6]), r"\[7, 2, 16\]", r"\[6, 2, 16\]"),
        Bad(name, "other_heads", turn(name, lambda x: x[:, :1]), r"\[7, 2, 16\]", r"\[7, 1, 16\]"),
        Bad(name, "other_width", turn(name, lambda x: x[..., :8]), r"\[7, 2, 16\]", r"\[7, 2, 8\]"),
        Bad(name, "last_stride", turn(name, column_major), "last stride of 1", r"\[32, 1, 2\]"),
        Bad(name, "device", turn(name, to_meta), "'s device", "meta"),
    ]


def bad_lse(name: str) -> list[Bad]:
    return [
        Bad(name, "other_dtype", turn(name, torch.Tensor.bfloat16), "float32", "bfloat16"),
        Bad(name, "tokens_by_heads_A18", turn(name, torch.Tensor.t), r"\[2, 7\]", r"\[7, 2\]"),
        Bad(name, "other_rows", turn(name, lambda x: x[:, :6]), r"\[2, 7\]", r"\[2, 6\]"),
        Bad(name, "vector", turn(name, torch.Tensor.flatten), r"\[2, 7\]", r"\[14\]"),
        Bad(name, "device", turn(name, to_meta), "'s device", "meta"),
    ]


@cases(
    Bad("out_a", "float64", turn("out_a", torch.Tensor.double), "float32, bfloat16 or float16", "float64"),
    Bad("out_a", "float8", turn("out_a", lambda x: x.to(torch.float8_e4m3fn)), "float32, bfloat16", "float8_e4m3fn"),
    Bad("out_a", "matrix", turn("out_a", lambda x: x[:, 0]), "3-D", r"\[7, 16\]"),
    Bad("out_a", "last_stride", turn("out_a", column_major), "last stride of 1", r"\[32, 1, 2\]"),
    *bad_out("out_b"),
    *bad_out("out"),
    *bad_lse("lse_a"),
    *bad_lse("lse_b"),
    *bad_lse("lse"),
    Bad("out", "overlapping", turn("out", lambda x: x[:1].expand(7, -1, -1)), "share memory", r"\[0, 16, 1\]"),
    Bad("lse", "overlapping", turn("lse", lambda x: x[:1].expand(2, -1)), "share memory", r"\[0, 1\]"),
)
def test_merge_states(bad: Bad) -> None:
    assert_refused(mla_prefill.merge_states, merge_arguments(), bad)


# ---- gather_latent ---------------------------------------------------------------------------------------------------


def gather_arguments() -> Arguments:
    return {
        "cache": torch.ones(4, 16, 576, dtype=torch.bfloat16),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "cu_seqlens": int32([0, 4, 7]),
        "starts": int32([0, 5]),
        "out": torch.full((7, 576), CANARY, dtype=torch.bfloat16),
    }


@cases(
    *bad_cu_seqlens("cu_seqlens"),
    Bad("cu_seqlens", "no_entries", put("cu_seqlens", int32([])), "at least one", ""),
    Bad("cache", "matrix", turn("cache", lambda x: x[0]), "3-D", r"\[16, 576\]"),
    Bad("cache", "last_stride", turn("cache", column_major), "last stride of 1", r"\[9216, 1, 16\]"),
    Bad("cache", "no_slots", turn("cache", lambda x: x[:, :0]), "block_size", r"\[4, 0, 576\]"),
    Bad("cache", "no_width", turn("cache", lambda x: x[..., :0]), "width", r"\[4, 16, 0\]"),
    Bad("block_table", "int64", turn("block_table", torch.Tensor.long), "int32", "int64"),
    Bad("block_table", "vector", turn("block_table", lambda x: x[0]), r"\[2, any\]", r"\[3\]"),
    Bad("block_table", "other_batch", turn("block_table", lambda x: x[:1]), r"\[2, any\]", r"\[1, 3\]"),
    Bad("block_table", "last_stride", turn("block_table", column_major), "last stride of 1", r"\[1, 2\]"),
    Bad("block_table", "device", turn("block_table", to_meta), "'s device", "meta"),
    Bad("starts", "int64", turn("starts", torch.Tensor.long), "int32", "int64"),
    Bad("starts", "other_batch", turn("starts", lambda x: x[:1]), r"\[2\]", r"\[1\]"),
    Bad("starts", "negative", turn("starts", lambda x: x - 1), "0 or above", "-1 at entry 0"),
    Bad("starts", "device", turn("starts", to_meta), "'s device", "meta"),
    Bad("out", "too_wide", turn("out", lambda x: torch.cat([x, x], -1)), "576", r"\[7, 1152\]"),
    Bad("out", "3d", turn("out", lambda x: x.unsqueeze(1)), r"\[rows, 576\]", r"\[7, 1, 576\]"),
    Bad("out", "last_stride", turn("out", column_major), "last stride of 1", r"\[1, 7\]"),
    Bad("out", "overlapping", turn("out", lambda x: x[:1].expand(7, -1)), "share memory", r"\[0, 1\]"),
    Bad("out", "device", turn("out", to_meta), "'s device", "meta"),
    Bad("layout", "unknown", put("layout", "nhd"), "'auto'", "'nhd'"),
    Bad("k_scale", "nan", put("k_scale", NAN), "finite as float32", "nan"),
    Bad("k_scale", "inf", put("k_scale", -INF), "finite as float32", "-inf"),
    Bad("k_scale", "inf_as_float32", put("k_scale", 1e39), "finite as float32", r"1e\+39"),
)
def test_gather_latent(bad: Bad) -> None:
    assert_refused(mla_prefill.gather_latent, gather_arguments(), bad)


@cases(
    Bad("cache", "vector", turn("cache", lambda x: x[0, 0]), "3-D", r"\[576\]"),
    Bad("cu_seqlens", "no_entries", put("cu_seqlens", int32([])), "at least one", ""),
    Bad("cu_seqlens", "decreasing", turn("cu_seqlens", lambda x: x.flip(0)), "never decrease", "after"),
    Bad("cu_seqlens", "negative", put("cu_seqlens", int32([-9, -5, -2])), "0 or above", "-"),
)
def test_gather_latent_that_allocates(bad: Bad) -> None:
    """Without out, rows are counted before the op checks its arguments: the message must not get worse."""
    assert_refused(mla_prefill.gather_latent, {**gather_arguments(), "out": None}, bad)


@cases(
    Bad("q", "vector", turn("q", lambda x: x[:, 0, 0]), "3-D", r"\[7\]"),
    Bad("v", "matrix", turn("v", lambda x: x[:, 0]), "3-D", r"\[11, 128\]"),
    Bad("k", "matrix", turn("k", lambda x: x[:, 0]), "3-D", r"\[11, 128\]"),
    Bad("k", "device", turn("k", to_meta), "'s device", "meta"),
    Bad("q", "float64", turn("q", torch.Tensor.double), "float32, bfloat16, float16", "float64"),
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_ragged_prefill_that_allocates(bad: Bad, return_lse: bool, device: str) -> None:
    arguments = {**prefill_arguments(device), "out": None, "lse": None, "return_lse": return_lse}
    assert_refused(mla_prefill.ragged_prefill, arguments, bad)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "make", "names"),
    [
        (mla_prefill.ragged_prefill, prefill_arguments, ("q", "k", "v", "k_pe", "out", "lse")),
        (mla_prefill.merge_states, merge_arguments, ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")),
        (mla_prefill.gather_latent, gather_arguments, ("cache", "out", "k_scale")),
    ],
    ids=["ragged_prefill", "merge_states", "gather_latent"],
)
def test_inference_only(function: Callable, make: Callable[[], Arguments], names: tuple[str, ...]) -> None:
    """As torch's functions with out= do: in grad mode an input that requires a gradient is refused, not cut off."""
    for name in names:

        def require_grad(arguments: Arguments, name: str = name) -> None:
            tensor = arguments.get(name)
            arguments[name] = (torch.ones(()) if tensor is None else tensor).requires_grad_()

        bad = Bad(name, "requires_grad", require_grad, "requires no gradient .*inference only", "requires_grad=True")
        assert_refused(function, make(), bad)
        for off in (torch.no_grad, torch.inference_mode):
            arguments = make()
            require_grad(arguments)
            if name == "k_scale":
                arguments["cache"] = arguments["cache"].to(torch.float8_e4m3fn)
            with off():
                function(**arguments)


@pytest.mark.parametrize("make", [prefill_arguments, plan_arguments, merge_arguments, gather_arguments])
def test_the_good_arguments_are_good(make: Callable[[], Arguments]) -> None:
    """Otherwise the tables above would show nothing."""
    functions = {
        prefill_arguments: mla_prefill.ragged_prefill,
        plan_arguments: mla_prefill.plan_prefill,
        merge_arguments: mla_prefill.merge_states,
        gather_arguments: mla_prefill.gather_latent,
    }
    functions[make](**make())
