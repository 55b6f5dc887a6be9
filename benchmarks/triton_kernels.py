"""Triton kernels that the step benchmark compares with: the merge of vLLM's path, and a projection that gathers."""

from __future__ import annotations

import torch
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


@triton.jit
def _gathered_matmul(
    a, rows, b, out, m, n, stride_a, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr
):
    # Eight blocks of rows share a column block of b in the L2.
    blocks_m, blocks_n, group = tl.cdiv(m, M), tl.cdiv(n, N), 8
    first = tl.program_id(0) // (group * blocks_n) * group
    size = min(blocks_m - first, group)
    block_m = first + tl.program_id(0) % (group * blocks_n) % size
    block_n = tl.program_id(0) % (group * blocks_n) // size
    row, column, step = block_m * M + tl.arange(0, M), block_n * N + tl.arange(0, N), tl.arange(0, STEP)
    cached = tl.load(rows + row, mask=row < m, other=0).to(tl.int64)
    at_a = a + cached[:, None] * stride_a + step[None, :]
    at_b = b + (column % n)[None, :] * K + step[:, None]
    total = tl.zeros((M, N), tl.float32)
    for _ in range(K // STEP):
        total = tl.dot(tl.load(at_a), tl.load(at_b), total)
        at_a += STEP
        at_b += STEP
    target = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def gathered_matmul(a: Tensor, rows: Tensor, b: Tensor) -> Tensor:
    """``a[rows, :k] @ b.T``: a ``[any, at least k]``, rows int32 ``[m]``, b ``[n, k]``; k a multiple of 64."""
    m, (n, k) = len(rows), b.shape
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, 128) * triton.cdiv(n, 256),)
    _gathered_matmul[grid](
        a, rows, b, out, m, n, a.stride(0), K=k, M=128, N=256, STEP=64, num_warps=8, num_stages=3
    )  # fmt: skip
    return out
