"""The ops of the library as Python functions, and their fake implementations for ``torch.compile``.

Each function allocates its outputs and calls ``torch.ops.mla_prefill.*``; all checks and all work are in the op.
Inference only: no op has a gradient. As torch's own functions with ``out=`` do, these refuse inputs that require one
while grad mode is on (``torch.no_grad()`` and ``torch.inference_mode()`` turn it off).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_prefill import _library  # noqa: F401  (registers the ops)
from mla_prefill._host import expect_no_grad, expect_one_device, last_entry
from mla_prefill.plan import PrefillPlan

__all__ = ["gather_latent", "merge_states", "ragged_prefill"]

_FP8 = torch.float8_e4m3fn
_DS_MLA_ROW_BYTES = 656
_DS_MLA_WIDTH = 576
_ragged_prefill = torch.ops.mla_prefill.ragged_prefill.default
_merge_states = torch.ops.mla_prefill.merge_states.default
_gather_latent = torch.ops.mla_prefill.gather_latent.default


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    scale: float,
    causal: bool,
    k_pe: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    plan: PrefillPlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    accumulate: bool = False,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a ragged batch: for each sequence and head ``softmax(scale * q @ k.T) @ v``.

    Sequence ``b`` owns the query rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]`` and the keys
    ``cu_seqlens_k[b]:cu_seqlens_k[b + 1]``. Rows outside every sequence are neither read nor written.

    Args:
        q: ``[total_q, num_heads, qk_head_dim]``, bfloat16, float16, float8_e4m3fn or (CPU) float32. Like all inputs
            it may have any strides whose last is 1.
        k: ``[total_k, num_heads, qk_head_dim]``, or ``[total_k, num_heads, qk_nope_head_dim]`` beside ``k_pe``.
        v: ``[total_k, num_heads, v_head_dim]``, usually a slice of the projection's output.
        cu_seqlens_q, cu_seqlens_k: int32 ``[batch + 1]``, ascending, on q's device.
        scale: factor of the logits, finite as float32 also times log2(e). It is the caller's: nothing derives it from a
            head dim (see ``softmax_scale``).
        causal: mask aligned bottom-right: row ``i`` sees key ``j`` iff ``j <= i + len_k - len_q``.
        k_pe: ``[total_k, qk_rope_head_dim]`` or ``[total_k, 1, qk_rope_head_dim]``, shared by all heads: the last
            part of each key. Passing it apart spares the concatenation.
        max_seqlen_q, max_seqlen_k: hints. No value changes a result.
        plan: from ``plan_prefill`` for the same lengths; made on the fly where it is None.
        out: ``[total_q, num_heads, v_head_dim]`` to write to, q's dtype (bfloat16 for float8 inputs).
        lse: float32 ``[num_heads, total_q]`` to write to.
        accumulate: ``out`` and ``lse`` hold a running state (of other keys of the same rows), and the result is
            merged into it. An lse of -inf or +inf marks an empty state, whatever ``out`` holds there.
        return_lse: also return ``lse``.
        q_descale, k_descale, v_descale: float32 factors of float8 inputs, one value or one per head.

    Returns:
        ``out``, or ``(out, lse)`` with ``return_lse``. ``lse`` is the natural log of the sum of exponentials of the
        scaled logits. A row that sees no key gives out 0 and lse -inf.

    Raises:
        RuntimeError: a wrong dtype, shape, stride or device, (CPU) impossible ``cu_seqlens``, or an input that requires
            a gradient in grad mode; nothing is written.
        ValueError: a plan made for other heads, dims or mask.
    """
    if torch.is_grad_enabled():
        expect_no_grad(q=q, k=k, v=v, k_pe=k_pe, out=out, lse=lse)
    if plan is not None:
        plan._expect(q.shape, v.shape, causal)
    if accumulate and (out is None or lse is None):
        missing = "out" if out is None else "lse"
        raise ValueError(f"{missing}: expected the running state's tensor with accumulate=True, got None")
    if out is None:
        dtype = q.dtype
        out = torch.empty(
            (*q.shape[:2], *v.shape[-1:]), dtype=torch.bfloat16 if dtype == _FP8 else dtype, device=q.device
        )
    if lse is None and return_lse:
        lse = torch.empty(q.shape[1::-1], dtype=torch.float32, device=q.device)
    _ragged_prefill(
        q,
        k,
        v,
        k_pe,
        cu_seqlens_q,
        cu_seqlens_k,
        scale,
        causal,
        max_seqlen_q,
        max_seqlen_k,
        None if plan is None else plan.tensor,
        out,
        lse,
        accumulate,
        q_descale,
        k_descale,
        v_descale,
    )
    return (out, lse) if return_lse else out


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges two attention states of the same rows over disjoint keys.

    ``w = exp(lse)``, ``out = (w_a out_a + w_b out_b) / (w_a + w_b)``, ``lse = ln(w_a + w_b)``. A side whose lse is
    -inf or +inf is empty: weight 0, its payload (NaN included) is not read. Two empty sides give 0 and -inf.

    Args:
        out_a, out_b: ``[tokens, num_heads, v_head_dim]``, float32, bfloat16 or float16, last stride 1.
        lse_a, lse_b: float32 ``[num_heads, tokens]``, natural log, any strides.
        out, lse: outputs of the same shapes and dtypes; each may be the very tensor of one input.

    Returns:
        ``(out, lse)``.

    Raises:
        RuntimeError: a wrong dtype, shape, stride or device, or an input that requires a gradient in grad mode;
            nothing is written.
    """
    if torch.is_grad_enabled():
        expect_no_grad(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)
    if out is None:
        out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    if lse is None:
        lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    _merge_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def gather_latent(
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    *,
    out: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    layout: str = "auto",
) -> Tensor:
    """Copies cached latent rows of each request into one dense tensor, dequantized.

    Row ``cu_seqlens[b] + i`` of the result is position ``starts[b] + i`` of request ``b``, found in block
    ``block_table[b, position // block_size]``. A position past the row of the block table, or a block id outside the
    cache, gives a row of zeros.

    Args:
        cache: ``[num_blocks, block_size, width]``, last stride 1.
        block_table: int32 ``[batch, max_blocks]``, last stride 1.
        cu_seqlens: int32 ``[batch + 1]``, ascending.
        starts: int32 ``[batch]``, 0 or above, any alignment to the block size.
        out: ``[rows, width]`` (576 for fp8_ds_mla) with at least ``cu_seqlens[-1]`` rows; the others are left alone.
            Without it the rows are counted by reading ``cu_seqlens`` on the host.
        k_scale: the cache's one scale, a float or a float32 tensor of one value; layout fp8_e4m3 only, 1 if None.
            An unquantised cache has no scale and takes none.
        layout: ``"plain"`` (bfloat16, float16, float32), ``"fp8_e4m3"`` (float8_e4m3fn, or its bytes as uint8),
            ``"fp8_ds_mla"`` (rows of 656 bytes: 512 float8 e4m3, 4 float32 scales for 128 values each, 64 bfloat16;
            the layout of DeepSeek's FlashMLA and of vLLM), or ``"auto"``: by dtype and width.

    Returns:
        ``out``: the cache's dtype for a plain cache, otherwise bfloat16 unless ``out`` says else.

    Raises:
        RuntimeError: an unsupported pair of layout and dtype, a wrong shape, stride or device, or an input that
            requires a gradient in grad mode.
        ValueError: a k_scale that is not finite as float32.
    """
    if torch.is_grad_enabled():
        expect_no_grad(cache=cache, out=out, k_scale=k_scale)
    if out is None:
        quantized = cache.dtype in (_FP8, torch.uint8)
        packed = quantized and cache.shape[-1] == _DS_MLA_ROW_BYTES and layout in ("auto", "fp8_ds_mla")
        out = cache.new_empty(
            (last_entry(cu_seqlens), _DS_MLA_WIDTH if packed else cache.shape[-1]),
            dtype=torch.bfloat16 if quantized else cache.dtype,
        )
    if k_scale is not None and not isinstance(k_scale, Tensor):
        if not abs(k_scale) <= torch.finfo(torch.float32).max:
            raise ValueError(f"k_scale: expected a number that is finite as float32, got {k_scale}")
        k_scale = torch.full((), k_scale, dtype=torch.float32, device=cache.device)
    _gather_latent(cache, block_table, cu_seqlens, starts, out, k_scale, layout)
    return out


# The out-variants return nothing, so under fake tensors there is nothing to do but to check.
for _name in ("ragged_prefill", "merge_states", "gather_latent"):
    torch.library.register_fake(f"mla_prefill::{_name}", expect_one_device(_name))
