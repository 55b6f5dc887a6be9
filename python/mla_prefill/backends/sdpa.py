"""SDPA: torch alone, on any device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mla_prefill.backends.adapter import AdapterBackend, LiveBatch

_LSE_ELEMENTS = 1 << 24  # logits of the lse held at a time, 64 MiB


class SdpaPrefillBackend(AdapterBackend):
    """SDPA: ``scaled_dot_product_attention`` for one sequence at a time.

    It does not return the lse, which is computed beside it where it is asked for: the logits twice, the price of a
    backend that runs everywhere.
    """

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)

    @staticmethod
    def get_name() -> str:
        return "SDPA"

    def _run(
        self, batch: LiveBatch, prepared: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty((*q.shape[:2], self.v_head_dim)) if out is None else out
        lse = q.new_empty((self.num_heads, q.shape[0]), dtype=torch.float32) if return_lse else None
        bounds_q, bounds_k = ([0, *lens.cumsum(0).tolist()] for lens in (batch.q_lens, batch.k_lens))
        for (first, last), (first_k, last_k) in zip(pairwise(bounds_q), pairwise(bounds_k), strict=True):
            # [1, heads, rows, dim]
            one_q, one_k, one_v = (
                x.transpose(0, 1).unsqueeze(0) for x in (q[first:last], k[first_k:last_k], v[first_k:last_k])
            )
            # Causal batches have as many keys as queries, so torch's top-left mask is the bottom-right one.
            attended = scaled_dot_product_attention(one_q, one_k, one_v, is_causal=batch.causal, scale=self.scale)
            out[first:last] = attended[0].transpose(0, 1)
            if lse is not None:
                self._log_sum_exp(one_q[0], one_k[0], batch.causal, lse[:, first:last])
        return out, lse

    def _log_sum_exp(self, q: Tensor, k: Tensor, causal: bool, lse: Tensor) -> None:
        """q and k [heads, rows, dim] -> lse [heads, rows]."""
        heads, rows, _ = q.shape
        step = max(1, _LSE_ELEMENTS // (heads * k.shape[1]))
        k = k.float().transpose(1, 2)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            logits = self.scale * (q[:, begin:end].float() @ k)
            if causal:
                hidden = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(begin + 1)
                logits.masked_fill_(hidden, -torch.inf)
            lse[:, begin:end] = logits.logsumexp(dim=-1)
