"""One real MLA layer of vLLM with its metadata builder and a paged cache, and what its output must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from helpers import Inputs, cu_seqlens, plain_torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import mla_prefill
from mla_prefill.backends.base import SplitKey
from mla_prefill.vllm.backend import NativeMLAPrefillBackend

NAME = "model.layers.0.self_attn.attn"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512


class Projection(torch.nn.Module):
    """As vLLM's linear layers: the result comes with a bias that was not added."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.params_dtype = weight.dtype
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.T, None


class FakeModelConfig:
    """What the layer and the builder read of vLLM's ``ModelConfig``, which would want a checkpoint."""

    rswa_window = None

    def __init__(self, dtype: torch.dtype, heads: int, latent_dim: int, **dims: int) -> None:
        self.dtype, self.max_model_len = dtype, MAX_MODEL_LEN
        self.heads, self.latent_dim = heads, latent_dim
        self.hf_text_config = SimpleNamespace(model_type="deepseek_v3", q_lora_rank=None, **dims)

    def get_num_attention_heads(self, parallel_config: Any) -> int:
        return self.heads

    def get_head_size(self) -> int:
        return self.latent_dim

    def __getattr__(self, name: str) -> None:  # vLLM asks for many features that an MLA model need not have
        return None


@dataclass
class Call:
    """What the backend was given in one call, and what it returned."""

    inputs: Inputs
    key: Tensor | SplitKey
    out: Tensor
    lse: Tensor | None


class RecordingBackend(NativeMLAPrefillBackend):
    """The native backend, its calls on record in ``calls`` of the test's model."""

    calls: list[Call] = []  # noqa: RUF012  (one list for all clones, emptied by each model)

    def run_prefill_new_tokens(self, **arguments: Any) -> Any:
        result = super().run_prefill_new_tokens(**arguments)
        starts = self._prefill_metadata.query_start_loc
        self._record(arguments, starts, starts, True, result if isinstance(result, tuple) else (result, None))
        return result

    def run_prefill_context_chunk(self, **arguments: Any) -> Any:
        result = super().run_prefill_context_chunk(**arguments)
        chunk = arguments["chunk"]
        self._record(arguments, chunk.query_start_loc, chunk.cu_seq_lens, False, result)
        return result

    def _record(self, arguments: dict[str, Any], cu_q: Tensor, cu_k: Tensor, causal: bool, result: Any) -> None:
        q, key, v = (arguments[name] for name in ("q", "k", "v"))
        k, k_pe = (
            (key.k_nope, key.k_pe.clone()) if isinstance(key, SplitKey) else (key, None)
        )  # the workspace is reused
        inputs = Inputs(q, k, v, cu_q, cu_k, scale=self.scale, causal=causal, k_pe=k_pe)
        self.calls.append(Call(inputs, key, result[0].clone(), None if result[1] is None else result[1].clone()))


@dataclass
class Model:
    heads: int = 4
    dims: tuple[int, int, int] = (128, 64, 128)
    kv_lora: int = 512
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backend: type | None = RecordingBackend  # None: vLLM's choice
    scale: float = 0.1352337788608801  # DeepSeek V3's, YaRN's part included
    workspace_rows: int | None = None  # smaller than vLLM's, so that there are several chunks
    config: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        torch.set_default_dtype(self.dtype)
        RecordingBackend.calls.clear()
        self.random = torch.Generator().manual_seed(0)
        nope, rope, v = self.dims
        latent = self.kv_lora + rope
        dims = {
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": v,
            "kv_lora_rank": self.kv_lora,
        }
        # VllmConfig checks types when it is constructed, not later.
        object.__setattr__(self.config, "model_config", FakeModelConfig(self.dtype, self.heads, latent, **dims))
        self.config.cache_config.block_size = BLOCK_SIZE
        # Its choice on a CPU with AMX has a prefill of its own.
        self.config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        self.weight = self.randn(self.heads * (nope + v), self.kv_lora) / self.kv_lora**0.5
        with set_current_vllm_config(self.config):
            self.layer = MLAAttention(
                num_heads=self.heads,
                scale=self.scale,
                q_lora_rank=None,
                kv_b_proj=Projection(self.weight),
                cache_config=self.config.cache_config,
                prefix=NAME,
                prefill_backend_cls=self.backend,
                **dims,
            )
        self.cache = torch.full((64, BLOCK_SIZE, latent), float("nan"), device=self.device)
        self.free = torch.randperm(len(self.cache), generator=self.random).tolist()
        self.builder = self.new_builder()

    def new_builder(self) -> Any:
        spec = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=self.cache.shape[-1], dtype=self.dtype)
        with set_current_vllm_config(self.config):
            builder = self.layer.attn_backend.get_builder_cls()(spec, [NAME], self.config, torch.device(self.device))
        if self.workspace_rows is not None:
            builder.chunked_prefill_workspace_size = self.workspace_rows
        return builder

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float32).to(self.device, self.dtype)


class Step:
    """One step of prefill: requests as (cached context, new tokens), at least two new tokens each: one is a decode."""

    def __init__(self, model: Model, requests: list[tuple[int, int]]) -> None:
        self.model, self.requests = model, requests
        self.context, self.new = ([request[i] for request in requests] for i in (0, 1))
        nope, rope, _ = model.dims
        latents, tables = [], []
        for context, new in requests:
            latent = model.randn(context + new, model.kv_lora + rope)
            blocks = torch.tensor([model.free.pop() for _ in range(-(-(context + new) // BLOCK_SIZE))])
            positions = torch.arange(context)
            model.cache[blocks[positions // BLOCK_SIZE], positions % BLOCK_SIZE] = latent[:context]
            latents.append(latent)
            tables.append(blocks)
        width = max(map(len, tables))
        self.block_table = torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t in tables])
        self.q = 2 * model.randn(sum(self.new), model.heads, nope + rope)
        fresh = torch.cat([latent[context:] for latent, context in zip(latents, self.context, strict=True)])
        self.kv_c, self.k_pe = fresh[:, : model.kv_lora], fresh[:, None, model.kv_lora :]
        self.latents = torch.cat(latents)

    def build(self, builder: Any = None) -> Any:
        device = self.model.device
        starts = cu_seqlens(self.new).clone()
        seq_lens = torch.tensor([sum(request) for request in self.requests], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(self.requests),
            num_actual_tokens=len(self.q),
            max_query_len=max(self.new),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.block_table.to(device, torch.int32),
            slot_mapping=torch.zeros(len(self.q), dtype=torch.int64, device=device),
        )
        return (builder or self.model.builder).build(0, common)

    def run(self, metadata: Any) -> Tensor:
        model = self.model
        output = torch.full((len(self.q), model.heads * model.dims[2]), float("nan"), device=model.device)
        with set_current_vllm_config(model.config):
            model.layer.forward_impl(self.q, self.kv_c, self.k_pe, model.cache, metadata, output=output)
        return output.view(len(self.q), model.heads, -1)

    def whole(self) -> Inputs:
        """Attention over the whole histories, as one call."""
        nope, _, v = self.model.dims
        kv = (self.latents[:, : self.model.kv_lora] @ self.model.weight.T).view(-1, self.model.heads, nope + v)
        return Inputs(
            self.q,
            kv[..., :nope],
            kv[..., nope:],
            cu_seqlens(self.new, self.model.device),
            cu_seqlens([sum(request) for request in self.requests], self.model.device),
            scale=self.model.scale,
            causal=True,
            k_pe=self.latents[:, self.model.kv_lora :] if self.model.dims[1] else None,
        )

    def check(self, out: Tensor, passes: int) -> None:
        """The error is at most twice that of plain torch, plus a rounding for each pass that a row went through, plus
        what float32 sums leave in the logits: those of the projection, whose rows vLLM groups otherwise, and of q k."""
        inputs = self.whole()
        oracle, lse = mla_prefill.reference.ragged_prefill(**inputs.kwargs(), return_lse=True)
        scale = oracle.abs().amax(dim=-1, keepdim=True)

        def worst(result: Tensor) -> float:
            return float(((result.double() - oracle).abs() / scale).max())

        plain, _ = plain_torch(inputs, self.model.dtype)
        terms = self.model.kv_lora + inputs.q.shape[2]
        logit_rounding = terms**0.5 * torch.finfo(torch.float32).eps * (1 + float(lse.abs().max()))
        allowed = 2 * worst(plain) + passes * torch.finfo(self.model.dtype).eps / 2 + logit_rounding
        assert out.isfinite().all() and worst(out) <= allowed, f"error {worst(out):.3g}, allowed {allowed:.3g}"
