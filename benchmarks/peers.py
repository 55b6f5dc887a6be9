"""What is measured on every device. A peer prepares its inputs outside the clock and returns the call to time."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import mla_prefill
from benchmarks.cases import Inputs
from benchmarks.timer import Run


class Peer:
    """A plug-in. ``kind`` is ``"ours"``, ``"peer"`` or ``"glue"`` (work that a peer needs done before it can start)."""

    name: str
    kind = "peer"

    def unavailable(self) -> str | None:
        """Imports what it needs; None, or the reason why it can't be measured here."""
        return None

    def version(self) -> str:
        return ""

    def prepare(self, inputs: Inputs) -> Run:
        """The call to time; raises where the shape is not supported."""
        raise NotImplementedError

    def state(self, result: object) -> tuple[Tensor, Tensor | None]:
        """A call's out ``[total_q, H, dim_v]`` and natural-log lse ``[H, total_q]`` (None: not comparable)."""
        out, lse = result
        return out, lse


class Ours(Peer):
    """``ragged_prefill``, V in place; K in its two parts or in one; the plan made outside the clock or by the call."""

    kind = "ours"

    def __init__(self, name: str = "ours", *, split_k: bool = True, planned: bool = False) -> None:
        self.name, self.split_k, self.planned = name, split_k, planned

    def version(self) -> str:
        return f"mla_prefill {mla_prefill.__version__}"

    def prepare(self, inputs: Inputs) -> Run:
        case = inputs.case
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        options = {"scale": inputs.scale, "causal": case.causal}
        options |= {"max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.kv_lens)}
        if self.split_k and case.head_dims[1]:
            options["k_pe"] = inputs.k_pe
        if self.planned:
            options["plan"] = mla_prefill.plan_prefill(
                *lengths,
                num_heads=case.num_heads,
                causal=case.causal,
                head_dims=case.head_dims,
                dtype=inputs.q.dtype,
                max_tokens_q=inputs.q.shape[0],
            )
        if inputs.q.is_cuda:
            options["return_lse"] = True  # as the peers there do
        else:  # a new output would cost page faults
            options["out"] = inputs.q.new_zeros(inputs.q.shape[0], case.num_heads, inputs.dim_v)
        k = inputs.k_nope if self.split_k else inputs.k
        return lambda: mla_prefill.ragged_prefill(inputs.q, k, inputs.v, *lengths, **options)


class Sdpa(Peer):
    """torch's SDPA on the CPU, one call per sequence, K concatenated ready-made.

    ``padded``: V padded to K's width; ``dense``: every sequence copied to dense tensors; both outside the clock.
    """

    def __init__(self, name: str, *, padded: bool, dense: bool) -> None:
        self.name, self.padded, self.dense = name, padded, dense

    def prepare(self, inputs: Inputs) -> Run:
        v = pad(inputs.v, (0, inputs.dim_qk - inputs.dim_v)) if self.padded else inputs.v
        sequences = []
        for b in range(len(inputs.case.q_lens)):
            rows = slice(int(inputs.cu_seqlens_q[b]), int(inputs.cu_seqlens_q[b + 1]))
            keys = slice(int(inputs.cu_seqlens_k[b]), int(inputs.cu_seqlens_k[b + 1]))
            parts = [x.transpose(0, 1).unsqueeze(0) for x in (inputs.q[rows], inputs.k[keys], v[keys])]
            sequences.append([x.contiguous() for x in parts] if self.dense else parts)
        options = {"is_causal": inputs.case.causal, "scale": inputs.scale}
        return lambda: [scaled_dot_product_attention(q, k, v, **options) for q, k, v in sequences]


CPU_PEERS = [
    Sdpa("sdpa, V padded", padded=True, dense=False),
    Sdpa("sdpa, V padded, dense copies", padded=True, dense=True),
    Sdpa("sdpa, unequal dims", padded=False, dense=False),
]
