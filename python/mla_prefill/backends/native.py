"""The backend of this package: ``ragged_prefill`` with one plan per step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mla_prefill.backends.base import MLAPrefillBackend, SplitKey
from mla_prefill.ops import ragged_prefill
from mla_prefill.plan import PrefillPlan, plan_prefill


class NativePrefillBackend(MLAPrefillBackend):
    """NATIVE: keys stay in two parts, a context chunk is merged by the kernel that computes it."""

    # Of the prepared step; by chunk.index.
    _new_tokens_plan: PrefillPlan
    _chunk_plans: list[PrefillPlan]

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        metadata, context = prefill_metadata, prefill_metadata.chunked_context

        def plan(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool, max_tokens_q: int) -> PrefillPlan:
            return plan_prefill(
                cu_seqlens_q,
                cu_seqlens_k,
                num_heads=self.num_heads,
                causal=causal,
                head_dims=(self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim),
                dtype=metadata.q_data_type,
                max_tokens_q=max_tokens_q,
            )

        starts = metadata.query_start_loc
        self._new_tokens_plan = plan(starts, starts, True, int(metadata.query_lens_cpu.sum()))
        self._chunk_plans = [
            plan(chunk.query_start_loc, chunk.cu_seq_lens, False, chunk.token_slice.stop - chunk.token_slice.start)
            for chunk in (context.chunks if context is not None else ())
        ]

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if output_scale is not None:
            raise ValueError("output_scale: expected None (NATIVE does not quantise its output), got a tensor")
        metadata = self._prepared()
        k, k_pe = _parts(k)
        return ragged_prefill(
            q,
            k,
            v,
            metadata.query_start_loc,
            metadata.query_start_loc,
            scale=self.scale,
            causal=True,
            k_pe=k_pe,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_query_len,
            plan=self._new_tokens_plan,
            out=out,
            return_lse=return_softmax_lse,
        )

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._run_chunk(chunk, q, k, v, out=out)

    def accumulate_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self._run_chunk(chunk, q, k, v, out=out, lse=lse, accumulate=True)

    def _run_chunk(self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, **state: Any) -> tuple[Tensor, Tensor]:
        self._prepared()
        k, k_pe = _parts(k)
        return ragged_prefill(
            q,
            k,
            v,
            chunk.query_start_loc,
            chunk.cu_seq_lens,
            scale=self.scale,
            causal=False,
            k_pe=k_pe,
            max_seqlen_q=chunk.max_query_len,
            max_seqlen_k=chunk.max_seq_len,
            plan=self._chunk_plans[chunk.index],
            return_lse=True,
            **state,
        )

    def _prepared(self) -> Any:
        if self._prefill_metadata is None:
            raise ValueError("prefill_metadata: expected prepare_metadata before the layers run, got none")
        return self._prefill_metadata


def _parts(k: Tensor | SplitKey) -> tuple[Tensor, Tensor | None]:
    return k if isinstance(k, SplitKey) else (k, None)
