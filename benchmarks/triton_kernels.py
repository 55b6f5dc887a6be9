"""The merge of vLLM's path, in Triton as vLLM has it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse, stride_a, stride_b, stride, lse_stride_a, lse_stride_b, lse_stride, heads,
    HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < heads
    a = tl.load(lse_a + head * lse_stride_a + token, mask=live, other=0.0)
    b = tl.load(lse_b + head * lse_stride_b + token, mask=live, other=0.0)
    top = tl.maximum(a, b)
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    tl.store(lse + head * lse_stride + token, top + tl.log(total), mask=live)
    at = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    rows_a = tl.load(out_a + token * stride_a + at, mask=live[:, None]).to(tl.float32)
    rows_b = tl.load(out_b + token * stride_b + at, mask=live[:, None]).to(tl.float32)
    merged = (
        rows_a * (weight_a / total)[:, None]
        + tl.where((weight_b > 0)[:, None], rows_b, 0.0) * (weight_b / total)[:, None]
    )
    tl.store(out + token * stride + at, merged.to(out.dtype.element_ty), mask=live[:, None])


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Of states of the same rows, ``[tokens, heads, dim]`` and ``[heads, tokens]``, heads dense in a row. The first one
    is live; the second may have an lse of -inf."""
    tokens, heads, dim = out_a.shape
    block = min(16, triton.next_power_of_2(heads))
    _merge[(tokens, triton.cdiv(heads, block))](
        out_a, lse_a, out_b, lse_b, out, lse, *(x.stride(0) for x in (out_a, out_b, out, lse_a, lse_b, lse)), heads,
        HEADS=block, DIM=dim,
    )  # fmt: skip
