"""What is measured: a peer prepares its inputs outside the clock and returns the call to time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import mla_prefill
from benchmarks.cases import NOPE, ROPE, SCALE, Inputs

Run = Callable[[], object]


def ours(inputs: Inputs) -> Run:
    """One call on the ragged batch, K in its two parts, V in place."""
    out = torch.zeros(inputs.q.shape[0], inputs.case.num_heads, inputs.v.shape[2], dtype=inputs.q.dtype)

    def run() -> Tensor:
        return mla_prefill.ragged_prefill(
            inputs.q,
            inputs.k_nope,
            inputs.v,
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            scale=SCALE,
            causal=inputs.case.causal,
            k_pe=inputs.k_pe,
            out=out,
        )

    return run


def _sdpa(inputs: Inputs, v: Tensor, contiguous: bool) -> Run:
    sequences = []
    for b in range(len(inputs.case.q_lens)):
        rows = slice(int(inputs.cu_seqlens_q[b]), int(inputs.cu_seqlens_q[b + 1]))
        keys = slice(int(inputs.cu_seqlens_k[b]), int(inputs.cu_seqlens_k[b + 1]))
        parts = [x.transpose(0, 1).unsqueeze(0) for x in (inputs.q[rows], inputs.k[keys], v[keys])]
        sequences.append([x.contiguous() for x in parts] if contiguous else parts)

    def run() -> list[Tensor]:
        return [
            scaled_dot_product_attention(q, k, v, is_causal=inputs.case.causal, scale=SCALE) for q, k, v in sequences
        ]

    return run


def sdpa_padded(inputs: Inputs) -> Run:
    """torch's SDPA per sequence, K concatenated and V padded to K's width ready-made."""
    return _sdpa(inputs, pad(inputs.v, (0, NOPE + ROPE - inputs.v.shape[2])), contiguous=False)


def sdpa_padded_dense(inputs: Inputs) -> Run:
    """The same on a dense copy per sequence, made outside the clock."""
    return _sdpa(inputs, pad(inputs.v, (0, NOPE + ROPE - inputs.v.shape[2])), contiguous=True)


def sdpa_unequal(inputs: Inputs) -> Run:
    """torch's SDPA per sequence, V at its own width."""
    return _sdpa(inputs, inputs.v, contiguous=False)


PEERS = {
    "sdpa, V padded": sdpa_padded,
    "sdpa, V padded, dense copies": sdpa_padded_dense,
    "sdpa, unequal dims": sdpa_unequal,
}
