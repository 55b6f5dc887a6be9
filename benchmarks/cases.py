"""Named shapes, and the inputs made of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tests.cases import MLA, Case

NOPE, ROPE, V = MLA
SCALE = (NOPE + ROPE) ** -0.5


def flops(case: Case) -> int:
    """Of both products, masked (query, key) pairs not counted."""
    pairs = 0
    for len_q, len_k in zip(case.q_lens, case.kv_lens, strict=True):
        if case.causal:  # bottom-right
            pairs += sum(max(0, min(len_k, row + 1 + len_k - len_q)) for row in range(len_q))
        else:
            pairs += len_q * len_k
    return 2 * (NOPE + ROPE + V) * case.num_heads * pairs


def _ragged(count: int, longest: int) -> tuple[int, ...]:
    source = random.Random(1)
    return tuple(source.randint(1, longest) for _ in range(count))


CASES = [
    Case("ragged 64 x 1..512", _ragged(64, 512), _ragged(64, 512), 16, True),
    Case("1 x 4096", (4096,), (4096,), 16, True),
    Case("q 64 x kv 8192", (64,), (8192,), 16, False),
]


@dataclass
class Inputs:
    """K in both forms and V as the slice of a projection, as a model has them."""

    case: Case
    q: Tensor
    k: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @staticmethod
    def of(case: Case, dtype: torch.dtype) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        tokens_q, tokens_k = sum(case.q_lens), sum(case.kv_lens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        kv = normal(tokens_k, case.num_heads, NOPE + V)
        k_nope, v = kv.split([NOPE, V], dim=-1)
        k_pe = normal(tokens_k, ROPE)
        return Inputs(
            case,
            normal(tokens_q, case.num_heads, NOPE + ROPE),
            torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, case.num_heads, -1)], dim=-1),
            k_nope,
            k_pe,
            v,
            _cumulative(case.q_lens),
            _cumulative(case.kv_lens),
        )


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
