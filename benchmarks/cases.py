"""Named shapes, and the inputs made of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from tests.cases import Case


def flops(case: Case) -> int:
    """Of both products, masked (query, key) pairs not counted."""
    pairs = 0
    for len_q, len_k in zip(case.q_lens, case.kv_lens, strict=True):
        if case.causal:  # bottom-right
            pairs += sum(max(0, min(len_k, row + 1 + len_k - len_q)) for row in range(len_q))
        else:
            pairs += len_q * len_k
    return 2 * sum(case.head_dims) * case.num_heads * pairs


def _draw(source: random.Random, count: int, shortest: int, longest: int) -> tuple[int, ...]:
    return tuple(source.randint(shortest, longest) for _ in range(count))


def _cpu_cases() -> list[Case]:
    ragged = _draw(random.Random(1), 64, 1, 512)
    return [
        Case("ragged 64 x 1..512", ragged, ragged, 16, True),
        Case("1 x 4096", (4096,), (4096,), 16, True),
        Case("q 64 x kv 8192", (64,), (8192,), 16, False),
    ]


def _cuda_cases() -> list[Case]:
    """Prefill of one rank, with all 128 heads or with 16 of them. The seed is part of the shapes."""
    source = random.Random(20260101)
    ragged = _draw(source, 64, 1, 2048)
    short = _draw(source, 512, 1, 128)
    context = _draw(source, 8, 1024, 16384)
    return [
        Case("a", (8192,), (8192,), 128, True, notes="1 x 8192"),
        Case("b", (4096,) * 4, (4096,) * 4, 128, True, notes="4 x 4096"),
        Case("c", (1024,) * 16, (1024,) * 16, 16, True, notes="16 x 1024"),
        Case("d", ragged, ragged, 16, True, notes="64 x 1..2048"),
        Case("e", (512,), (32768,), 16, False, notes="q 512 x kv 32768"),
        Case("f", (32768,), (32768,), 16, True, notes="1 x 32768"),
        Case("g", short, short, 16, True, notes="512 x 1..128"),
        Case("h", (256,) * 8, context, 16, False, notes="8 x q 256, kv 1k..16k"),
        Case("i", (2048,), (30720,), 128, False, notes="q 2048 x kv 30720"),
        Case("j", (512, 1500, 6000, 180), (9000, 3500, 6000, 20000), 16, True, notes="cached prefixes"),
    ]


CPU_CASES = {case.name: case for case in _cpu_cases()}
CUDA_CASES = {case.name: case for case in _cuda_cases()}


@dataclass
class Inputs:
    """What a model has before attention, normal values: q ``[total_q, H, nope + rope]``, k_pe ``[total_k, rope]``, and
    k_nope ``[total_k, H, nope]`` and v ``[total_k, H, dim_v]``, strided slices of the projection's output."""

    case: Case
    q: Tensor
    k_nope: Tensor
    k_pe: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor

    @staticmethod
    def of(case: Case, dtype: torch.dtype, device: str = "cpu") -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        nope, rope, dim_v = case.head_dims
        tokens_q, tokens_k = sum(case.q_lens), sum(case.kv_lens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        k_nope, v = normal(tokens_k, case.num_heads, nope + dim_v).split([nope, dim_v], dim=-1)
        k_pe = normal(tokens_k, rope)
        q = normal(tokens_q, case.num_heads, nope + rope)
        return Inputs(case, q, k_nope, k_pe, v, *(_cumulative(x).to(device) for x in (case.q_lens, case.kv_lens)))

    @property
    def dim_qk(self) -> int:
        return self.q.shape[2]

    @property
    def dim_v(self) -> int:
        return self.v.shape[2]

    @property
    def scale(self) -> float:
        return self.dim_qk**-0.5

    @cached_property
    def k(self) -> Tensor:
        """``[total_k, H, nope + rope]``, K in one piece; made at its first use, which no clock sees."""
        return concat_k(self.k_nope, self.k_pe)

    @cached_property
    def v_dense(self) -> Tensor:
        """A contiguous copy of v, likewise."""
        return self.v.contiguous()


def concat_k(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """As vLLM's generic path does it: an empty tensor and two strided copies."""
    nope = k_nope.shape[2]
    k = k_nope.new_empty((*k_nope.shape[:-1], nope + k_pe.shape[1]))
    k[..., :nope] = k_nope
    k[..., nope:] = k_pe.unsqueeze(1)
    return k


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
