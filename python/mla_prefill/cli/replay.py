"""Runs a request trace through one MLA layer with random weights, measures it and checks it against the oracle."""

from __future__ import annotations

import itertools
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mla_prefill import reference
from mla_prefill.cli.checks import expect_between
from mla_prefill.cli.scheduler import ScheduledRequest, Scheduler, Step
from mla_prefill.cli.trace import TRACE_BLOCK, Request
from mla_prefill.forward_context import DeviceConfig, EngineConfig, ModelConfig, StageClock
from mla_prefill.layer import MLAAttention
from mla_prefill.metadata import MLAMetadataBuilder, PrefillContextChunk, PrefillMetadata
from mla_prefill.models import ModelShape, get_model

LAYER_NAME = "model.layers.0.self_attn"

# Standard deviation of the queries. With unit keys the logits then spread by 2 to 3, so that attention is neither
# flat (where a wrong key would not show) nor a copy of one value.
QUERY_STD = 2.0

_MAX_SAMPLES = 100_000  # per step; each is a row of attention in float64


@dataclass(frozen=True)
class ReplayConfig:
    model: str = "deepseek-v2-lite"
    tp: int = 1
    dtype: str = "bfloat16"
    device: str = "cpu"
    budget: int = 8192  # new tokens per step
    block_size: int = 64
    cache_tokens: int = 262144
    workspace_rows: int = 16384
    max_steps: int | None = None
    verify: int = 4  # (row, head) pairs checked per step
    seed: int = 0


@dataclass
class Verification:
    """The sampled result that came closest to its tolerance, or went furthest past it."""

    samples: int = 0
    failures: int = 0
    error: float = 0.0
    tolerance: float = 0.0
    where: str = ""

    @property
    def passed(self) -> bool:
        return self.failures == 0

    def add(self, error: float, tolerance: float, where: str) -> None:
        error = math.inf if math.isnan(error) else error
        self.samples += 1
        self.failures += error > tolerance
        if self.samples == 1 or error * self.tolerance > self.error * tolerance:
            self.error, self.tolerance, self.where = error, tolerance, where


@dataclass
class ReplayReport:
    config: ReplayConfig
    heads: int  # per rank
    scale: float
    threads: int
    requests: int = 0
    steps: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    context_rows: int = 0  # rows gathered and projected again
    chunks: int = 0
    evictions: int = 0
    seconds: Counter[str] = field(default_factory=Counter)  # per stage of the layer
    layer_seconds: float = 0.0
    total_seconds: float = 0.0  # with inputs and verification
    attention_flops: int = 0  # without padding
    projection_flops: int = 0
    verification: Verification = field(default_factory=Verification)
    workspace_bytes: int = 0
    cache_bytes: int = 0
    peak_rss_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        prompt_tokens = self.new_tokens + self.cached_tokens
        return self.cached_tokens / prompt_tokens if prompt_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        return _per_second(self.new_tokens, self.layer_seconds)

    @property
    def gflops(self) -> dict[str, float]:
        """GFLOP/s of the two stages that multiply."""
        return {
            "attention": _per_second(self.attention_flops, self.seconds["attention"]) / 1e9,
            "projection": _per_second(self.projection_flops, self.seconds["projection"]) / 1e9,
        }


def _per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def replay(
    requests: list[Request], config: ReplayConfig, on_step: Callable[[ReplayReport], None] = lambda report: None
) -> ReplayReport:
    """Schedules the requests into steps and runs each through the layer.

    Latents depend on the seed and the hash block alone, so requests that share a prefix share its latents, and a
    prompt's whole history can be made again for the oracle. Seconds count the layer only.

    Raises:
        ValueError: a config that does not fit the model or the trace.
    """
    begin = time.perf_counter()
    engine = _Engine(requests, config)
    report = engine.report
    for step in itertools.islice(engine.scheduler.steps(), config.max_steps):
        engine.run(step)
        report.requests = engine.scheduler.admitted
        report.cached_tokens = engine.scheduler.hit_tokens
        report.evictions = engine.scheduler.pool.evictions
        report.total_seconds = time.perf_counter() - begin
        report.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        on_step(report)
    return report


class _Engine:
    """One layer with its cache, and what feeds it."""

    def __init__(self, requests: list[Request], config: ReplayConfig) -> None:
        expect_between("verify", config.verify, 0, _MAX_SAMPLES)
        self.config = config
        self.shape = get_model(config.model)
        self.heads = self.shape.heads_per_rank(config.tp)
        self.dtype = _dtype(config.dtype)
        self.device = _device(config.device)
        self.latents = _Latents(self.shape, self.dtype, config.seed)
        self.random = torch.Generator().manual_seed(config.seed % 2**63)

        prompts = TRACE_BLOCK * sum(len(request.hash_ids) for request in requests)
        # More than the prompts would never be filled.
        cache_tokens, workspace_rows = (min(rows, prompts) for rows in (config.cache_tokens, config.workspace_rows))
        self.scheduler = Scheduler(
            requests, budget=config.budget, block_size=config.block_size, cache_tokens=cache_tokens
        )
        # NaN, so that a row that is read before it was written can't go unnoticed.
        self.cache = torch.full(
            (self.scheduler.pool.num_blocks, config.block_size, self.shape.latent_dim),
            torch.nan,
            dtype=self.dtype,
            device=self.device,
        )
        engine_config = EngineConfig(
            device_config=DeviceConfig(self.device), model_config=ModelConfig(self.dtype, self.shape)
        )
        self.layer = self._make_layer(engine_config)
        self.builder = MLAMetadataBuilder(
            [LAYER_NAME],
            engine_config,
            block_size=config.block_size,
            dtype=self.dtype,
            device=self.device,
            workspace_rows=workspace_rows,
        )
        on_host = self.device.type == "cpu"
        self.clock = StageClock() if on_host else StageClock(partial(torch.accelerator.synchronize, self.device))
        self.report = ReplayReport(
            config=config,
            heads=self.heads,
            scale=self.layer.scale,
            threads=torch.get_num_threads(),
            workspace_bytes=self.builder.workspace.nbytes,
            cache_bytes=self.cache.nbytes,
        )

    def _make_layer(self, engine_config: EngineConfig) -> MLAAttention:
        shape = self.shape
        out_features = self.heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        projection = torch.nn.Linear(shape.kv_lora_rank, out_features, bias=False)
        with torch.no_grad():  # unit variance of keys and values
            projection.weight.normal_(std=shape.kv_lora_rank**-0.5, generator=self.random)
        return MLAAttention(
            num_heads=self.heads,
            kv_lora_rank=shape.kv_lora_rank,
            qk_nope_head_dim=shape.qk_nope_head_dim,
            qk_rope_head_dim=shape.qk_rope_head_dim,
            v_head_dim=shape.v_head_dim,
            kv_b_proj=projection.to(self.device, self.dtype),
            prefix=LAYER_NAME,
            vllm_config=engine_config,
            rope_scaling=shape.rope_scaling,
        )

    def run(self, step: Step) -> None:
        q = QUERY_STD * torch.randn(step.num_tokens, self.heads, self.shape.qk_head_dim, generator=self.random)
        q = q.to(self.dtype)
        latent = torch.cat(
            [
                block
                for entry in step.requests
                for block in self.latents.blocks(entry.request, entry.context, entry.context + entry.tokens)
            ]
        )
        metadata = self._metadata(step)
        kv_c, k_pe = latent.to(self.device).split([self.shape.kv_lora_rank, self.shape.qk_rope_head_dim], dim=1)
        q_on_device = q.to(self.device)
        begin = time.perf_counter()
        with self.clock.active():
            out = self.layer(q_on_device, kv_c, k_pe, self.cache, metadata)
        self.report.layer_seconds += time.perf_counter() - begin
        chunks = metadata.chunked_context.chunks if metadata.chunked_context else []
        self._count(step, chunks)
        self._verify(step, chunks, q, out)

    def _metadata(self, step: Step) -> PrefillMetadata:
        block_size = self.config.block_size
        width = max(len(entry.blocks) for entry in step.requests)
        block_table = torch.full((len(step.requests), width), -1, dtype=torch.int32)
        slots = []
        for row, entry in enumerate(step.requests):
            blocks = torch.tensor(entry.blocks)
            block_table[row, : len(blocks)] = blocks
            positions = torch.arange(entry.context, entry.context + entry.tokens)
            slots.append(blocks[positions // block_size] * block_size + positions % block_size)
        return self.builder.build(
            [entry.tokens for entry in step.requests],
            [entry.context + entry.tokens for entry in step.requests],
            block_table,
            torch.cat(slots),
        )

    def _count(self, step: Step, chunks: list[PrefillContextChunk]) -> None:
        shape, report = self.shape, self.report
        context_rows = sum(chunk.num_context_tokens for chunk in chunks)
        # Token i of n new ones after c of context sees c + i + 1 keys.
        pairs = sum(entry.tokens * entry.context + entry.tokens * (entry.tokens + 1) // 2 for entry in step.requests)
        report.steps += 1
        report.new_tokens += step.num_tokens
        report.chunks += len(chunks)
        report.context_rows += context_rows
        report.attention_flops += 2 * pairs * self.heads * (shape.qk_head_dim + shape.v_head_dim)
        report.projection_flops += 2 * (step.num_tokens + context_rows) * self.layer.kv_b_proj.weight.numel()
        report.seconds = self.clock.seconds

    def _verify(self, step: Step, chunks: list[PrefillContextChunk], q: Tensor, out: Tensor) -> None:
        starts = list(itertools.accumulate((entry.tokens for entry in step.requests), initial=0))
        for _ in range(self.config.verify):
            row = int(torch.randint(step.num_tokens, (), generator=self.random))
            head = int(torch.randint(self.heads, (), generator=self.random))
            index = next(i for i, start in enumerate(starts[1:]) if row < start)
            entry = step.requests[index]
            position = entry.context + row - starts[index]
            oracle, oracle_lse, plain = self._expected(entry, position, head, q[row, head])
            # Twice the error of the same computation in plain torch and the same dtype, and what no implementation
            # avoids: one rounding of the output for each partial result, and that of float32 logits.
            partials = 1 + sum(chunk.request_slice.start <= index < chunk.request_slice.stop for chunk in chunks)
            logit_rounding = 4 * torch.finfo(torch.float32).eps * (1 + abs(oracle_lse))
            rounding = (partials * torch.finfo(self.dtype).eps / 2 + logit_rounding) * oracle.abs().max()
            self.report.verification.add(
                error=float((out[row, head].cpu().double() - oracle).abs().max()),
                tolerance=float(2 * (plain.double() - oracle).abs().max() + rounding),
                where=f"step {self.report.steps}, request {entry.index}, token {position}, head {head}",
            )

    def _expected(self, entry: ScheduledRequest, position: int, head: int, q: Tensor) -> tuple[Tensor, float, Tensor]:
        """One row and head over its whole history: the oracle's out and lse, and out in plain torch and q's dtype."""
        shape = self.shape
        latents = list(self.latents.blocks(entry.request, 0, position + 1))
        weight = self.layer.kv_b_proj.weight.detach().view(self.heads, -1, shape.kv_lora_rank)[head].cpu()

        def keys_and_values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            parts = []
            for latent in latents:
                kv_c, k_pe = latent.to(dtype).split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=1)
                parts.append(torch.cat([k_pe, kv_c @ weight.to(dtype).T], dim=1))
            k_pe, k_nope, v = torch.cat(parts).split(
                [shape.qk_rope_head_dim, shape.qk_nope_head_dim, shape.v_head_dim], dim=1
            )
            return torch.cat([k_nope, k_pe], dim=1), v

        k, v = keys_and_values(torch.float64)
        bounds = [torch.tensor([0, length]) for length in (1, position + 1)]
        oracle, lse = reference.ragged_prefill(
            q[None, None], k[:, None], v[:, None], *bounds, scale=self.layer.scale, causal=True, return_lse=True
        )
        k, v = keys_and_values(q.dtype)
        plain = torch.softmax(self.layer.scale * (k @ q), dim=0) @ v
        return oracle[0, 0], float(lse), plain


class _Latents:
    """Random latents [tokens, latent_dim] that depend on the seed and the hash block alone."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, seed: int) -> None:
        self.width = shape.latent_dim
        self.dtype = dtype
        self.seed = seed

    def blocks(self, request: Request, begin: int, end: int) -> Iterator[Tensor]:
        """The latents of the prompt's tokens [begin, end), in parts of one hash block each."""
        for index in range(begin // TRACE_BLOCK, -(-end // TRACE_BLOCK)):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + request.hash_ids[index]) % 2**63)
            block = torch.randn(TRACE_BLOCK, self.width, generator=generator).to(self.dtype)
            start = index * TRACE_BLOCK
            yield block[max(begin - start, 0) : end - start]


def _dtype(name: str) -> torch.dtype:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ValueError(f"dtype: expected one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def _device(name: str) -> torch.device:
    names = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        count = torch.accelerator.device_count()
        names += [accelerator.type, *(f"{accelerator.type}:{index}" for index in range(count))]
    if name not in names:
        raise ValueError(f"device: expected {' or '.join(names)}, got {name!r}")
    return torch.device(name)
