"""Inputs in awkward memory, guarded outputs, and the tolerance rule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from cases import MLA, Case
from torch import Tensor

import mla_prefill

FP8 = torch.float8_e4m3fn
NAN = float("nan")
INF = float("inf")
CANARY = 7.0  # exact in every dtype
LAYOUTS = ("dense", "head_major", "odd_offset", "sliced", "padded_rows")


# ---- devices ---------------------------------------------------------------------------------------------------------


def has_kernel(op: str, device: str) -> bool:
    """Whether the dispatcher has a kernel of ``torch.ops.mla_prefill.<op>`` for tensors on this device."""
    key = torch.device(device).type.upper()
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mla_prefill::{op}", key)


GPU_KERNELS = ("hip",) if torch.version.hip else ("sm90", "sm80")


def gpu_kernels() -> list[str]:
    """Those of ragged_prefill that a call may take on this device, the preferred one first."""
    if torch.version.hip:
        return ["hip"]
    capability, forced = torch.cuda.get_device_capability(), os.environ.get("MLA_PREFILL_FORCE", "")
    try:
        return import_module("mla_prefill._C").cuda_kernels(*capability, forced)[0]
    except ImportError:  # it belongs to one Python version, the kernels to none: then those of a whole build
        built = ["sm90", "sm80"] if capability == (9, 0) else ["sm80"]
        return [name for name in built if forced in ("", name)]


def use_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, ragged_prefill on a GPU is this kernel or a refusal."""
    monkeypatch.delenv("MLA_PREFILL_FORCE", raising=False)
    if name not in gpu_kernels():
        pytest.skip(f"no {name} kernel for this device")
    if name != "hip":
        monkeypatch.setenv("MLA_PREFILL_FORCE", name)


def skip_without_kernel(op: str, device: str) -> None:
    if not has_kernel(op, device):
        pytest.skip(f"{op} has no kernel for {torch.device(device).type} in this build")


def skip_without_memory(device: str, needed: int) -> None:
    """``needed`` bytes, where memory that is never touched is memory nevertheless."""
    if device != "cpu":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < needed:
            pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} GiB are free")


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Embedded:
    """A strided view into a larger buffer of one repeated value."""

    view: Tensor
    buffer: Tensor
    fill: float

    def assert_rest_untouched(self) -> None:
        rest = torch.ones_like(self.buffer, dtype=torch.bool)
        rest.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(False)
        around = self.buffer.float()[rest]
        expected = torch.full_like(around, self.fill)
        assert torch.equal(around, expected), f"{int((around != expected).sum())} elements beside the view were written"


def embed(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    layout: str = "dense",
    fill: float = CANARY,
) -> Embedded:
    """A view of this shape with a last stride of 1, in a buffer that holds ``fill`` before, between and behind it.

    ``head_major``: the first two dimensions swapped in memory (what a batched GEMM gives); ``odd_offset``: not even
    4-byte aligned for 2-byte elements; ``sliced``: a part of wider rows (a fused projection's output);
    ``padded_rows``: extra elements between rows only. The extra is an odd number of elements, but 16 bytes of 2-byte
    elements for a GPU kernel that refuses less.
    """
    extra = 5 if torch.device(device).type == "cpu" or gpu_kernels() == ["sm80"] else 8
    order = [1, 0, *range(2, len(shape))] if layout == "head_major" and len(shape) == 3 else list(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
        if (layout == "sliced" and dim == len(shape) - 1) or (layout == "padded_rows" and dim == 1):
            step += extra
    before = 3 if layout == "odd_offset" else 64
    buffer = torch.full((before + step + 64,), fill, device=device).to(dtype)
    return Embedded(buffer.as_strided(tuple(shape), strides, before), buffer, fill)


def place(values: Tensor, layout: str = "dense", fill: float = NAN) -> Tensor:
    """The same values in a layout of ``embed``, NaN around them."""
    embedded = embed(values.shape, values.dtype, str(values.device), layout=layout, fill=fill)
    embedded.view.copy_(values)
    return embedded.view


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal to the last bit, NaNs included."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    different = bits(got) != bits(expected)
    assert not different.any(), f"{int(different.sum())} of {got.numel()} elements differ"


def int32(values: Sequence[int], device: str = "cpu") -> Tensor:
    """An int32 vector at an address that is a multiple of 4 bytes only, as a slice of a larger buffer is."""
    buffer = torch.tensor([-1, *values, -1], dtype=torch.int32, device=device)
    return buffer[1:-1]


def cu_seqlens(lens: Sequence[int], device: str = "cpu", start: int = 0) -> Tensor:
    bounds = [start]
    for length in lens:
        bounds.append(bounds[-1] + length)
    return int32(bounds, device)


# ---- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The tensors of one ``ragged_prefill`` call."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    scale: float
    causal: bool
    k_pe: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def kwargs(self) -> dict[str, object]:
        return dict(vars(self))

    @property
    def device(self) -> str:
        return str(self.q.device)

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.q.dtype == FP8 else self.q.dtype

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (self.q.shape[0], self.q.shape[1], self.v.shape[2])

    @property
    def lse_shape(self) -> tuple[int, int]:
        return (self.q.shape[1], self.q.shape[0])

    def bounds(self) -> list[tuple[slice, slice]]:
        """Query rows and keys of each sequence."""
        q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [(slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(len(q) - 1)]

    def map_tensors(self, function, *names: str) -> Inputs:
        return replace(
            self, **{name: function(getattr(self, name)) for name in names if getattr(self, name) is not None}
        )

    def with_joined_k(self) -> Inputs:
        """The same keys as one tensor."""
        if self.k_pe is None:
            return self
        shared = self.k_pe.reshape(self.k.shape[0], 1, self.k_pe.shape[-1]).expand(-1, self.k.shape[1], -1)
        return replace(self, k=torch.cat([self.k, shared], dim=-1), k_pe=None)

    def sequence(self, index: int) -> Inputs:
        """One sequence as a batch of its own, in memory of its own."""
        rows, keys = self.bounds()[index]
        alone = self.map_tensors(lambda x: x[rows].clone(), "q").map_tensors(
            lambda x: x[keys].clone(), "k", "v", "k_pe"
        )
        return replace(
            alone,
            cu_seqlens_q=cu_seqlens([rows.stop - rows.start], self.device),
            cu_seqlens_k=cu_seqlens([keys.stop - keys.start], self.device),
        )


def make_inputs(
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    split_k: bool = True,
    layout: str = "dense",
    before: int = 0,
    after: int = 0,
    outside: float = NAN,
    scale: float | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs of a case. ``before`` and ``after`` rows of ``outside`` values surround the sequences.

    In the layout ``projection`` k and v are the two slices of one tensor, as the output of kv_b_proj gives them.
    """
    generator = torch.Generator().manual_seed(seed)
    nope, rope, dim_v = case.head_dims
    total_q, total_k = sum(case.q_lens), sum(case.kv_lens)

    def rows(total: int, *shape: int) -> Tensor:
        tensor = torch.full((before + total + after, *shape), outside)
        tensor[before : before + total] = torch.randn((total, *shape), generator=generator)
        return tensor.to(dtype).to(device)

    q, k_pe = rows(total_q, case.num_heads, nope + rope), rows(total_k, rope)
    if layout == "projection":
        k, v = rows(total_k, case.num_heads, nope + dim_v).split([nope, dim_v], dim=-1)
    else:
        k, v = rows(total_k, case.num_heads, nope), rows(total_k, case.num_heads, dim_v)
    inputs = Inputs(
        q,
        k,
        v,
        cu_seqlens(case.q_lens, device, before),
        cu_seqlens(case.kv_lens, device, before),
        scale=(nope + rope) ** -0.5 if scale is None else scale,
        causal=case.causal,
        k_pe=k_pe if rope else None,
    )
    if not split_k:
        inputs = inputs.with_joined_k()
    if layout == "projection":
        return inputs
    return inputs.map_tensors(lambda x: place(x, layout), "q", "k", "v", "k_pe")


def quantize(inputs: Inputs, per_head: bool = False) -> Inputs:
    """The inputs in float8 e4m3, with the factors that undo the scaling."""

    def factor(x: Tensor) -> Tensor:
        magnitudes = x.float().abs().transpose(0, 1).flatten(1) if per_head else x.float().abs().reshape(1, -1)
        return torch.nn.functional.pad(magnitudes, (0, 1), value=1e-3).amax(dim=1) / 448.0  # the largest e4m3 value

    joined = inputs.with_joined_k()
    descales = [factor(x) for x in (joined.q, joined.k, joined.v)]
    q, k, v = (
        (x.float() / d.reshape(1, -1, 1)).to(FP8) for x, d in zip((joined.q, joined.k, joined.v), descales, strict=True)
    )
    return replace(joined, q=q, k=k, v=v, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])


# ---- running ---------------------------------------------------------------------------------------------------------


def refused_argument(inputs: Inputs, out: Tensor) -> str | None:
    """What the GPU kernel's message must begin with where it can't take the call: the first argument of this kind."""
    if inputs.q.device.type == "cpu":
        return None
    refused = [refused_by(kernel, inputs, out) for kernel in gpu_kernels()]
    return None if None in refused else refused[-1]


def refused_by(kernel: str, inputs: Inputs, out: Tensor) -> str | None:
    if inputs.q.dtype not in (torch.bfloat16, torch.float16):
        return "q"
    dims = (inputs.q.shape[2], inputs.k.shape[2], inputs.v.shape[2])
    if kernel == "sm80":
        return "head dims" if any(dim > 256 or dim % 8 for dim in dims) else None
    dim_qk, dim_k, dim_v = dims
    pairs = ((192, 128), (128, 128), (256, 256)) if kernel == "sm90" else ((192, 128),)
    if (dim_qk, dim_v) not in pairs or dim_k != (dim_qk if inputs.k_pe is None else dim_qk - MLA[1]):
        return "head dims"
    if not inputs.scale > 0:
        return "scale"
    alignment = 4 if kernel == "hip" else 16
    for name, x in (("q", inputs.q), ("k", inputs.k), ("k_pe", inputs.k_pe), ("v", inputs.v), ("out", out)):
        if x is None:
            continue
        strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        if x.data_ptr() % alignment or any(stride * x.itemsize % alignment for stride in strides):
            return name
    return None


def assert_refused_by_kernel(argument: str, inputs: Inputs, out: Tensor, lse: Tensor, **options: object) -> str:
    """The message. Nothing may have been written, and the device must be well."""
    before = out.clone(), lse.clone()
    with pytest.raises(RuntimeError, match=rf"^{argument}: expected .* \((sm90|sm80|hip) kernel\), got ") as caught:
        mla_prefill.ragged_prefill(**inputs.kwargs(), out=out, lse=lse, **options)
    torch.cuda.synchronize()
    assert_same_bits(out, before[0])
    assert_same_bits(lse, before[1])
    return str(caught.value)


def skip_refused(inputs: Inputs, out: Tensor | None = None, lse: Tensor | None = None) -> None:
    """Ends a test whose inputs aren't for this device, after showing that they are refused by name."""
    out = torch.zeros(inputs.out_shape, dtype=inputs.out_dtype, device=inputs.device) if out is None else out
    lse = torch.zeros(inputs.lse_shape, device=inputs.device) if lse is None else lse
    if argument := refused_argument(inputs, out):
        pytest.skip(f"refused, as it must be: {assert_refused_by_kernel(argument, inputs, out, lse)}")


def run(inputs: Inputs, *, out_layout: str = "dense", **options: object) -> tuple[Tensor, Tensor]:
    """``ragged_prefill`` into poisoned outputs amid canaries; checks all that it must not touch."""
    out = embed(inputs.out_shape, inputs.out_dtype, inputs.device, layout=out_layout)
    lse = embed(inputs.lse_shape, torch.float32, inputs.device, layout=out_layout)
    out.view.fill_(NAN)
    lse.view.fill_(NAN)
    skip_refused(inputs, out.view, lse.view)
    bounds_before = inputs.cu_seqlens_q.clone(), inputs.cu_seqlens_k.clone()
    result = mla_prefill.ragged_prefill(**inputs.kwargs(), out=out.view, lse=lse.view, return_lse=True, **options)
    assert result[0] is out.view and result[1] is lse.view
    out.assert_rest_untouched()
    lse.assert_rest_untouched()
    assert torch.equal(inputs.cu_seqlens_q, bounds_before[0]) and torch.equal(inputs.cu_seqlens_k, bounds_before[1])

    first, last = int(inputs.cu_seqlens_q[0]), int(inputs.cu_seqlens_q[-1])
    for rows in (slice(0, first), slice(last, None)):
        assert out.view[rows].isnan().all() and lse.view[:, rows].isnan().all(), "rows outside sequences were written"
    return result


# ---- what is right ---------------------------------------------------------------------------------------------------


def visible_keys(inputs: Inputs) -> Tensor:
    """How many keys each query row sees, by the contract's words: j <= i + Lk - Lq. Rows outside sequences: 0."""
    seen = torch.zeros(inputs.q.shape[0], dtype=torch.int64)
    for rows, keys in inputs.bounds():
        len_q, len_k = rows.stop - rows.start, keys.stop - keys.start
        row = torch.arange(len_q)
        seen[rows] = (row + 1 + len_k - len_q).clamp(0, len_k) if inputs.causal else torch.full_like(row, len_k)
    return seen.to(inputs.q.device)


def plain_torch(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The textbook computation with every intermediate in ``dtype``: the yardstick of the tolerance."""
    joined = inputs.with_joined_k()
    num_heads = joined.q.shape[1]
    out = torch.zeros(inputs.out_shape, dtype=dtype, device=joined.q.device)
    lse = torch.full(inputs.lse_shape, -INF, dtype=torch.float64, device=joined.q.device)

    def heads_first(x: Tensor, rows: slice, descale: Tensor | None) -> Tensor:
        x = x[rows].to(dtype).transpose(0, 1)
        return x if descale is None else x * descale.to(dtype).expand(num_heads).reshape(-1, 1, 1)

    for rows, keys in joined.bounds():
        q = heads_first(joined.q, rows, joined.q_descale)
        k = heads_first(joined.k, keys, joined.k_descale)
        v = heads_first(joined.v, keys, joined.v_descale)
        logits = (q @ k.transpose(1, 2)) * joined.scale
        if joined.causal:
            seen = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
            logits = logits.masked_fill(~seen, -INF)
        if k.shape[1]:
            weights = torch.softmax(logits, dim=-1)
            weights = weights.masked_fill(torch.isneginf(logits).all(dim=-1, keepdim=True), 0.0)
            out[rows] = (weights @ v).transpose(0, 1)
        lse[:, rows] = torch.logsumexp(logits, dim=-1).double()
    return out, lse


def assert_matches_oracle(inputs: Inputs, out: Tensor, lse: Tensor, *, passes: int = 1) -> None:
    """The tolerance rule, for the rows inside sequences.

    The error may be at most twice that of ``plain_torch`` in the same precision, plus what no implementation avoids:
    the rounding of the result, once per pass over a running state, and of float32 logits, whose size |lse| tells.
    Errors of ``out`` are measured against the scale of their row: a row that averages thousands of keys is much
    smaller than one that sees two, and an absolute bound made for the second would accept garbage in the first. The
    row's scale is its largest element, but not less than keys of random sign average to, since a row of few elements
    can cancel by chance. lse is absolute already (a relative error of the sum), and must be float32-exact for inputs
    of any dtype.

    Errors must not add up either. Truncated weights, or a truncated result, shrink a row by a quarter to a half of eps,
    which hides below the largest error but not in the mean of many rows. Rounding to nearest errs either way: allowed
    are four standard errors of as many rows that err by up to eps / 2 each, and eps / 8 for what rows have in common,
    like the weight of the largest key, which rounds the same way in all of them.
    """
    assert out.dtype == inputs.out_dtype and out.shape == inputs.out_shape
    assert lse.dtype == torch.float32 and lse.shape == inputs.lse_shape
    expected, expected_lse = mla_prefill.reference.ragged_prefill(**inputs.kwargs(), return_lse=True)
    seen = visible_keys(inputs)
    first, last = int(inputs.cu_seqlens_q[0]), int(inputs.cu_seqlens_q[-1])
    inside = torch.zeros_like(seen, dtype=torch.bool)
    inside[first:last] = True

    dead = inside & (seen == 0)
    assert (out[dead] == 0).all(), "a row without keys must be 0"
    assert torch.isneginf(lse[:, dead]).all(), "the lse of a row without keys must be -inf"

    live = inside & (seen > 0)
    if not live.any():
        return
    assert out[live].isfinite().all() and lse[:, live].isfinite().all()
    low_out, _ = plain_torch(inputs, inputs.out_dtype)
    _, low_lse = plain_torch(inputs, torch.float32)

    values = inputs.v[int(inputs.cu_seqlens_k[0]) : int(inputs.cu_seqlens_k[-1])].double()
    if inputs.v_descale is not None:
        values = values * inputs.v_descale.reshape(1, -1, 1)
    typical = values[values.isfinite()].square().mean().sqrt() / seen[live].double().sqrt()
    exact = expected[live]
    scale = torch.maximum(exact.abs().amax(dim=-1), typical.unsqueeze(-1)).clamp(min=1e-30).unsqueeze(-1)

    def worst(result: Tensor) -> float:
        return float(((result[live].double() - exact).abs() / scale).max())

    # Rounding errors of a sum of D terms add up like a random walk.
    largest_logit = 1 + float(expected_lse[:, live].abs().max())
    logit_rounding = inputs.q.shape[2] ** 0.5 * torch.finfo(torch.float32).eps * largest_logit
    eps = torch.finfo(out.dtype).eps
    error, allowed = worst(out), 2 * worst(low_out) + passes * eps / 2 + logit_rounding
    assert error <= allowed, f"out: relative error {error:.3g}, allowed {allowed:.3g}"

    mean_square = torch.maximum(exact.square().mean(dim=-1), typical.square().unsqueeze(-1)).clamp(min=1e-60)
    growth = ((out[live].double() - exact) * exact).mean(dim=-1) / mean_square  # of each row along its exact result
    error, allowed = float(growth.mean()), passes * eps * (1 / 8 + 4 / (12 * growth.numel()) ** 0.5) + logit_rounding
    assert abs(error) <= allowed, f"out: mean relative error {error:.3g}, allowed {allowed:.3g} either way"

    def worst_lse(result: Tensor) -> float:
        return float((result[:, live].double() - expected_lse[:, live]).abs().max())

    error, allowed = worst_lse(lse), 2 * worst_lse(low_lse) + passes * logit_rounding
    assert error <= allowed, f"lse: error {error:.3g}, allowed {allowed:.3g}"


def check(inputs: Inputs, **options: object) -> tuple[Tensor, Tensor]:
    """Runs, compares with the oracle, and returns ``(out, lse)``."""
    out, lse = run(inputs, **options)
    assert_matches_oracle(inputs, out, lse)
    return out, lse


# ---- running states --------------------------------------------------------------------------------------------------


def partial_passes(inputs: Inputs, num_chunks: int) -> list[Inputs]:
    """The new tokens of each sequence (causal), and its context cut into chunks (every row sees all of a chunk)."""

    def keys_of(take: object, causal: bool) -> Inputs:
        ranges = []
        for rows, keys in inputs.bounds():
            context = (
                max(0, (keys.stop - keys.start) - (rows.stop - rows.start)) if inputs.causal else keys.stop - keys.start
            )
            low, high = take(context, keys.stop - keys.start)
            ranges.append(torch.arange(keys.start + low, keys.start + high, device=inputs.q.device))
        index = torch.cat(ranges)
        chosen = inputs.map_tensors(lambda x: x[index], "k", "v", "k_pe")
        return replace(chosen, cu_seqlens_k=cu_seqlens([len(r) for r in ranges], inputs.device), causal=causal)

    chunks = [
        keys_of(lambda context, _, c=c: (context * c // num_chunks, context * (c + 1) // num_chunks), False)
        for c in range(num_chunks)
    ]
    new_tokens = [keys_of(lambda context, total: (context, total), True)] if inputs.causal else []
    return new_tokens + chunks


def accumulate(passes: list[Inputs], out_layout: str = "dense") -> tuple[torch.Tensor, torch.Tensor]:
    out = embed(passes[0].out_shape, passes[0].out_dtype, passes[0].device, layout=out_layout)
    lse = embed(passes[0].lse_shape, torch.float32, passes[0].device, layout=out_layout)
    out.view.fill_(NAN)
    lse.view.fill_(-INF)
    for one in passes:
        mla_prefill.ragged_prefill(**one.kwargs(), out=out.view, lse=lse.view, accumulate=True)
    out.assert_rest_untouched()
    lse.assert_rest_untouched()
    return out.view, lse.view


def merge_in(dtype: torch.dtype, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The merge of two states by its formula, in ``dtype``. Live sides only."""
    a, b = lse_a.to(dtype), lse_b.to(dtype)
    lse = torch.logaddexp(a, b)
    weight_a, weight_b = (torch.exp(side - lse).t().unsqueeze(-1) for side in (a, b))
    return weight_a * out_a.to(dtype) + weight_b * out_b.to(dtype), lse
