"""Attention libraries that run q/k head dim 192 with v head dim 128 on a GPU, some other dims too. Each is optional.

They get K concatenated and V contiguous ready-made; all return the lse. A causal mask is aligned bottom-right in all.
"""

from __future__ import annotations

import importlib
import math
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.cases import Inputs, concat_k
from benchmarks.peers import Peer
from benchmarks.timer import Run


class ConcatK(Peer):
    """What a peer needs before it can start: K in one piece."""

    name, kind = "K concat", "glue"

    def prepare(self, inputs: Inputs) -> Run:
        return lambda: concat_k(inputs.k_nope, inputs.k_pe)


class Library(Peer):
    """A peer that is a Python package: ``module`` is imported, ``distribution`` names its version."""

    module: str
    distribution: str

    def unavailable(self) -> str | None:
        try:
            self.load()
        except Exception as error:  # a broken library must not stop the run, whatever it raises
            return f"{type(error).__name__}: {error}"
        return None

    def load(self) -> None:
        self.library = importlib.import_module(self.module)

    def version(self) -> str:
        try:
            return f"{self.distribution} {version(self.distribution)}"
        except PackageNotFoundError:
            return self.distribution


class Fa3(Library):
    """FlashAttention-3's forward: ``num_splits`` 1, or 0 for its own choice of KV splits."""

    module, distribution = "fa3_fwd._C", "fa3-fwd"
    op_library = "fa3_fwd"
    before_splits = (0, 0.0, False, None)  # attention_chunk, softcap, rotary_interleaved, scheduler_metadata
    after_splits = (None, 0)  # pack_gqa, sm_margin

    def __init__(self, name: str, num_splits: int) -> None:
        self.name, self.num_splits = name, num_splits

    def prepare(self, inputs: Inputs) -> Run:
        case = inputs.case
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, max(case.q_lens), max(case.kv_lens))
        return self.call(inputs.q, inputs.k, inputs.v_dense, *lengths, case.causal, inputs.scale)

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool,
        scale: float,
    ) -> Run:
        """Returns out and lse."""
        op = getattr(torch.ops, self.op_library).fwd.default
        arguments = (
            *(q, k, v, None, None, None, None),  # k_new, v_new, q_v, out
            *(cu_seqlens_q, cu_seqlens_k, None, None, None),  # cu_seqlens_k_new, seqused_q, seqused_k
            *(max_seqlen_q, max_seqlen_k),
            *(None,) * 9,  # page_table, kv_batch_idx, leftpad_k, rotary_cos, _sin, seqlens_rotary, 3 descales
            *(scale, causal, -1, -1),  # no window
            *(*self.before_splits, self.num_splits, *self.after_splits),
        )
        return lambda: op(*arguments)[:2]


class VllmFa3(Fa3):
    """vLLM's fork of it, from the extension in vLLM's wheel; vLLM itself is not imported."""

    distribution = "vllm"
    op_library = "_vllm_fa3_C"
    before_splits = (0.0, True, None)  # it has no attention_chunk
    after_splits = (None, 0, None, 1, 0, None)  # then s_aux, and context parallelism: world size, rank, total lengths

    def load(self) -> None:
        pattern = "vllm/vllm_flash_attn/_vllm_fa3_C*.so"
        found = [path for folder in sys.path for path in Path(folder or ".").glob(pattern)]
        if not found:
            raise ImportError(f"no {pattern} on sys.path")
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            torch.ops.load_library(str(found[0]))


# Without KV split, and with the number of pieces that the library chooses.
FLASH_ATTENTION_3 = (
    Fa3("fa3", 1),
    Fa3("fa3-autosplit", 0),
    VllmFa3("vllm-fa3", 1),
    VllmFa3("vllm-fa3-autosplit", 0),
)


class FlashInfer(Library):
    """The ragged wrapper with one of its backends, fa3 (wgmma) or fa2 (mma.sync); its plan, made on the host, stays
    outside the clock."""

    module, distribution = "flashinfer", "flashinfer-python"
    workspace_bytes = 512 << 20

    def __init__(self, name: str, backend: str) -> None:
        self.name, self.backend = name, backend

    def prepare(self, inputs: Inputs) -> Run:
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=inputs.q.device)
        wrapper = self.library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self.backend)
        case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v_dense
        wrapper.plan(
            inputs.cu_seqlens_q.cpu(),
            inputs.cu_seqlens_k.cpu(),
            case.num_heads,
            case.num_heads,
            inputs.dim_qk,
            head_dim_vo=inputs.dim_v,
            causal=case.causal,
            sm_scale=inputs.scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        return lambda: wrapper.run(q, k, v, return_lse=True)

    def state(self, result: object) -> tuple[Tensor, Tensor]:
        out, lse = result
        return out, lse.T * math.log(2)  # base 2, [total_q, H]


class Fa4(Library):
    """FlashAttention-4 (CuTe DSL), compiled at its first call."""

    name, module, distribution = "fa4", "flash_attn.cute.interface", "flash-attn-4"

    def prepare(self, inputs: Inputs) -> Run:
        case, q, k, v = inputs.case, inputs.q, inputs.k, inputs.v_dense
        options = {
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": inputs.cu_seqlens_k,
            "max_seqlen_q": max(case.q_lens),
            "max_seqlen_k": max(case.kv_lens),
            "softmax_scale": inputs.scale,
            "causal": case.causal,
            "return_lse": True,
        }
        return lambda: self.library.flash_attn_varlen_func(q, k, v, **options)[:2]


class TorchMemEff(Peer):
    """torch's memory-efficient attention, the kernel under its SDPA that takes unequal head dims and ragged batches."""

    name = "torch-memeff"

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def prepare(self, inputs: Inputs) -> Run:
        case, q, k, v = inputs.case, inputs.q[None], inputs.k[None], inputs.v_dense[None]
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, max(case.q_lens), max(case.kv_lens))
        mask = 2 if case.causal else 0  # 2: bottom-right
        op = torch.ops.aten._efficient_attention_forward
        return lambda: op(q, k, v, None, *lengths, 0.0, mask, True, scale=inputs.scale)[:2]

    def state(self, result: object) -> tuple[Tensor, None]:
        return result[0][0], None  # the lse is padded per sequence


class TorchFlash(TorchMemEff):
    """torch's FlashAttention-2, V padded to K's width ready-made."""

    name = "torch-flash"

    def prepare(self, inputs: Inputs) -> Run:
        case, q, k, v = inputs.case, inputs.q, inputs.k, pad(inputs.v, (0, inputs.dim_qk - inputs.dim_v))
        lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, max(case.q_lens), max(case.kv_lens))
        op = torch.ops.aten._flash_attention_forward

        def run() -> tuple[Tensor, Tensor]:
            out, lse, *_ = op(q, k, v, *lengths, 0.0, case.causal, False, scale=inputs.scale)
            return out[..., : inputs.dim_v], lse

        return run

    def state(self, result: object) -> tuple[Tensor, None]:
        return result[0], None
