"""Whole steps of prefill as cases: requests with cached context and new tokens, and the tensors of one layer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import accumulate, islice

import torch
from torch import Tensor

from mla_prefill.backends import NativePrefillBackend
from mla_prefill.cli.scheduler import Scheduler
from mla_prefill.cli.trace import read_trace
from mla_prefill.forward_context import EngineConfig
from mla_prefill.layer import MLAAttention
from mla_prefill.metadata import MLAMetadataBuilder, PrefillContextChunk, PrefillMetadata
from tests.cases import MLA

NOPE, ROPE, V = MLA
SCALE = (NOPE + ROPE) ** -0.5
LATENT = 512
BLOCK_SIZE = 64
TRACE_BUDGET = 8192  # new tokens per step
TRACE_CACHE_TOKENS = 2**20
LAYER_NAME = "layer"


@dataclass(frozen=True)
class StepCase:
    name: str
    requests: tuple[tuple[int, int], ...]  # (context, new tokens)
    num_heads: int
    workspace_rows: int

    @property
    def new_tokens(self) -> int:
        return sum(new for _, new in self.requests)

    @property
    def context_tokens(self) -> int:
        return sum(context for context, _ in self.requests)


STEP_CASES = {
    case.name: case
    for case in (
        StepCase("new 8192", ((0, 8192),), 128, 8192),
        StepCase("q 2048 + context 30720", ((30720, 2048),), 128, 8192),
        StepCase("q 512 + context 32768", ((32768, 512),), 16, 65536),
    )
}


def trace_steps(count: int, num_heads: int, workspace_rows: int = 65536) -> list[StepCase]:
    """The first steps that replay's scheduler cuts out of the packaged part of Mooncake's conversation trace."""
    with resources.as_file(resources.files("mla_prefill") / "data" / "mooncake_sample.jsonl") as path:
        requests = read_trace(path)
    scheduler = Scheduler(requests, budget=TRACE_BUDGET, block_size=BLOCK_SIZE, cache_tokens=TRACE_CACHE_TOKENS)
    return [
        StepCase(f"trace {i}", tuple((x.context, x.tokens) for x in step.requests), num_heads, workspace_rows)
        for i, step in enumerate(islice(scheduler.steps(), count))
    ]


class StepInputs:
    """A layer with its cache and the inputs of one step, normal values in bfloat16.

    The new tokens come as the projection's output. The cache's blocks are in random order.
    """

    def __init__(self, case: StepCase, device: str = "cuda") -> None:
        self.case = case
        self.generator = torch.Generator(device).manual_seed(0)
        self.device = device
        features = case.num_heads * (NOPE + V)
        projection = torch.nn.Linear(LATENT, features, bias=False, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            projection.weight.copy_(self._normal(features, LATENT) / math.sqrt(LATENT))
        config = EngineConfig()
        self.layer = MLAAttention(
            num_heads=case.num_heads,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=V,
            kv_b_proj=projection,
            prefix=LAYER_NAME,
            vllm_config=config,
            prefill_backend_cls=NativePrefillBackend,
        )
        self.builder = MLAMetadataBuilder(
            [LAYER_NAME],
            config,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=device,
            workspace_rows=case.workspace_rows,
        )
        self.q = self._normal(case.new_tokens, case.num_heads, NOPE + ROPE)
        self.latent = self._normal(case.new_tokens, LATENT + ROPE)
        self.k_pe = self.latent[:, LATENT:].contiguous()
        with torch.no_grad():
            self.kv = projection(self.latent[:, :LATENT]).view(-1, case.num_heads, NOPE + V)
        needed = [-(-context // BLOCK_SIZE) for context, _ in case.requests]
        self.cache = self._normal(max(1, sum(needed)), BLOCK_SIZE, LATENT + ROPE)
        order = torch.randperm(len(self.cache), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        self.block_table = torch.zeros(len(needed), max(1, *needed), dtype=torch.int32)
        for row, blocks in zip(self.block_table, order.split([*needed, len(order) - sum(needed)]), strict=False):
            row[: len(blocks)] = blocks
        self.metadata: PrefillMetadata = self.builder.build(
            [new for _, new in case.requests],
            [context + new for context, new in case.requests],
            self.block_table,
            torch.full((case.new_tokens,), -1),
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.bfloat16, device=self.device)

    @property
    def chunks(self) -> list[PrefillContextChunk]:
        return self.metadata.chunked_context.chunks if self.metadata.chunked_context else []

    @cached_property
    def chunk_rows(self) -> list[Tensor]:
        """Of each chunk, the row of the flat cache of each context token, int64 on the device."""
        return [
            torch.cat(
                [
                    self.slots(chunk.request_slice.start + i, start, start + length)
                    for i, (start, length) in enumerate(
                        zip(chunk.starts.tolist(), chunk.seq_lens.tolist(), strict=True)
                    )
                ]
            )
            for chunk in self.chunks
        ]

    def slots(self, request: int, begin: int, end: int) -> Tensor:
        positions = torch.arange(begin, end)
        blocks = self.block_table[request].long()[positions // BLOCK_SIZE]
        return (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(self.device)

    def error(self, out: Tensor, samples: int) -> float:
        """The largest error of sampled rows of single heads against float64, relative to their largest element."""
        source = torch.Generator().manual_seed(1)
        bounds = list(accumulate((new for _, new in self.case.requests), initial=0))
        weight = self.layer.kv_b_proj.weight.detach().view(self.case.num_heads, NOPE + V, LATENT)
        worst = 0.0
        for _ in range(samples):
            row = int(torch.randint(self.case.new_tokens, (), generator=source))
            head = int(torch.randint(self.case.num_heads, (), generator=source))
            request = next(i for i, end in enumerate(bounds[1:]) if row < end)
            cached = self.cache.view(-1, LATENT + ROPE)[self.slots(request, 0, self.case.requests[request][0])]
            latent = torch.cat([cached, self.latent[bounds[request] : row + 1]]).double()
            projected = latent[:, :LATENT] @ weight[head].double().T
            keys = torch.cat([projected[:, :NOPE], latent[:, LATENT:]], dim=1)
            expected = torch.softmax(SCALE * (keys @ self.q[row, head].double()), dim=0) @ projected[:, NOPE:]
            worst = max(worst, float((out[row, head].double() - expected).abs().max() / expected.abs().max()))
        return worst
