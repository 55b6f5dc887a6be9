"""The oracle: the contract of ``ragged_prefill`` in float64 and plain torch, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ragged_prefill"]


def _factor(descale: Tensor | None, num_heads: int) -> Tensor | float:
    return 1.0 if descale is None else descale.double().reshape(-1).expand(num_heads).view(num_heads, 1, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q ``[H, Lq, D]``, k ``[H, Lk, D]``, v ``[H, Lk, Dv]`` in float64 -> out ``[H, Lq, Dv]``, lse ``[H, Lq]``."""
    len_q, len_k = q.shape[1], k.shape[1]
    logits = scale * (q @ k.transpose(1, 2))
    if causal:
        row = torch.arange(len_q, device=q.device).unsqueeze(1)
        key = torch.arange(len_k, device=q.device).unsqueeze(0)
        logits = logits.masked_fill(key > row + (len_k - len_q), float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.unsqueeze(-1))
    weights = weights.masked_fill(torch.isneginf(logits), 0.0)  # a row without keys: exp(-inf - -inf)
    return weights @ v, lse


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
    out: Tensor | None = None,
    lse: Tensor | None = None,
    accumulate: bool = False,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **hints: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """As ``mla_prefill.ragged_prefill``, with float64 results (rows outside every sequence are 0 and -inf).

    ``out`` and ``lse`` are read where ``accumulate`` says so and never written; ``plan`` and the ``max_seqlen`` hints
    are accepted and have no effect. Memory grows with ``num_heads * len_q * len_k`` of the largest sequence.
    """
    unknown = set(hints) - {"plan", "max_seqlen_q", "max_seqlen_k"}
    if unknown:
        raise TypeError(f"ragged_prefill got unexpected keyword arguments {sorted(unknown)}")
    num_heads = q.shape[1]
    if k_pe is not None:
        k = torch.cat([k, k_pe.reshape(k.shape[0], 1, k_pe.shape[-1]).expand(-1, num_heads, -1)], dim=-1)
    result = q.new_zeros((q.shape[0], num_heads, v.shape[2]), dtype=torch.float64)
    result_lse = q.new_full((num_heads, q.shape[0]), float("-inf"), dtype=torch.float64)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(bounds_q) - 1):
        rows = slice(bounds_q[b], bounds_q[b + 1])
        keys = slice(bounds_k[b], bounds_k[b + 1])
        one_out, one_lse = _attend(
            q[rows].double().transpose(0, 1) * _factor(q_descale, num_heads),
            k[keys].double().transpose(0, 1) * _factor(k_descale, num_heads),
            v[keys].double().transpose(0, 1) * _factor(v_descale, num_heads),
            scale,
            causal,
        )
        result[rows] = one_out.transpose(0, 1)
        result_lse[:, rows] = one_lse
    if accumulate:
        result, result_lse = _merge(result, result_lse, out.double(), lse.double())
    return (result, result_lse) if return_lse else result


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse_a, lse_b = (x.masked_fill(torch.isinf(x), float("-inf")) for x in (lse_a, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)

    def weighted(out: Tensor, side: Tensor) -> Tensor:
        dead = torch.isneginf(side).t().unsqueeze(-1)
        return (torch.exp(side - lse).t().unsqueeze(-1) * out).masked_fill(dead, 0.0)

    return weighted(out_a, lse_a) + weighted(out_b, lse_b), lse
