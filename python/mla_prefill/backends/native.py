"""The backend of this package: ``ragged_prefill`` with one plan per step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_prefill.backends.base import Capability, MLADimensions, SplitKey, asked_of, is_nvidia
from mla_prefill.backends.ragged import RaggedBatch, RaggedPrefillBackend
from mla_prefill.ops import ragged_prefill
from mla_prefill.plan import PrefillPlan, plan_prefill


@dataclass(frozen=True)
class _GpuKernel:
    dimensions: str  # for messages
    takes: Callable[[MLADimensions], bool]


HOPPER_DIMENSIONS = tuple(
    MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v)
    for nope, rope, v in ((128, 64, 128), (64, 64, 128), (128, 0, 128), (192, 64, 256), (256, 0, 256))
)
_HALF = (torch.bfloat16, torch.float16)


def _suit_portable_kernel(dims: MLADimensions) -> bool:
    widths = (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
    return all(width % 8 == 0 for width in widths) and max(sum(widths[:2]), widths[2]) <= 256


_GPU_KERNELS = {
    "sm90": _GpuKernel(", ".join(map(str, HOPPER_DIMENSIONS)), lambda dims: dims in HOPPER_DIMENSIONS),
    "sm80": _GpuKernel("multiples of 8 up to 256 for q, k and v", _suit_portable_kernel),
}


class NativePrefillBackend(RaggedPrefillBackend):
    """NATIVE: keys stay in two parts, a context chunk is merged by the kernel that computes it."""

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)
    compute_capabilities: ClassVar[str] = "8.0 and above or the CPU"

    _plans: dict[RaggedBatch, PrefillPlan]  # of the prepared step

    @staticmethod
    def get_name() -> str:
        return "NATIVE"

    @classmethod
    def supports_compute_capability(cls, device_capability: Capability) -> bool:
        return device_capability is None or (is_nvidia(device_capability) and tuple(device_capability) >= (8, 0))

    @classmethod
    def validate_configuration(cls, device_capability: Capability, selector_config: Any) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        if device_capability is None or not cls.supports_compute_capability(device_capability):
            return reasons
        # The CPU's kernel takes every dtype and all dims; a GPU's does not.
        dtype, dims = asked_of(selector_config)
        names, problem = _cuda_kernels(tuple(device_capability))
        if not _has_cuda_kernel():
            reasons.append("build: expected one with CUDA kernels, got a build without them, or a torch without CUDA")
        elif problem:
            reasons.append(f"build: {problem}")
        kernels = [_GPU_KERNELS[name] for name in names or _GPU_KERNELS]
        if dtype in cls.supported_dtypes and dtype not in _HALF:
            reasons.append(f"dtype: expected one of {', '.join(map(str, _HALF))} on a GPU, got {dtype}")
        if dims is not None and not any(kernel.takes(MLADimensions.of(dims)) for kernel in kernels):
            expected = " or ".join(kernel.dimensions for kernel in kernels)
            reasons.append(f"dims (qk_nope, qk_rope, v): expected {expected} on a GPU, got {MLADimensions.of(dims)}")
        return reasons

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        self._plans = {}
        dtype = getattr(prefill_metadata, "q_data_type", None)
        for batch in (self._new_tokens, *self._chunks):
            if batch.num_tokens_q is not None and dtype is not None:
                self._plan(batch, batch.num_tokens_q, dtype)

    def accumulate_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        batch = self._batch_of(chunk, None)
        self._check_tensors(batch, q, k, v, out)
        self._attend(batch, q, k, v, True, out, lse=lse, accumulate=True)

    def _attend(
        self,
        batch: RaggedBatch,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        return_lse: bool,
        out: Tensor | None,
        **state: Any,
    ) -> tuple[Tensor, Tensor | None]:
        k, k_pe = k if isinstance(k, SplitKey) else (k, None)
        result = ragged_prefill(
            q,
            k,
            v,
            batch.cu_seqlens_q,
            batch.cu_seqlens_k,
            scale=self.scale,
            causal=batch.causal,
            k_pe=k_pe,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            plan=self._plan(batch, q.shape[0], q.dtype),
            out=out,
            return_lse=return_lse,
            **state,
        )
        return result if return_lse else (result, None)

    def _plan(self, batch: RaggedBatch, max_tokens_q: int, dtype: torch.dtype) -> PrefillPlan:
        """The batch's plan: made in ``prepare_metadata``, or by the first layer where the host knew too little."""
        plan = self._plans.get(batch)
        if plan is None:
            plan = self._plans[batch] = plan_prefill(
                batch.cu_seqlens_q,
                batch.cu_seqlens_k,
                num_heads=self.num_heads,
                causal=batch.causal,
                head_dims=(self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim),
                dtype=dtype,
                max_tokens_q=max_tokens_q,
            )
        return plan


def _cuda_kernels(capability: tuple[int, int]) -> tuple[list[str], str]:
    """Names of this build's kernels for a device, the preferred one first, or why there is none."""
    try:
        binding = import_module("mla_prefill._C")
    except ImportError:  # built for another Python: the op will say it
        return list(_GPU_KERNELS), ""
    return binding.cuda_kernels(*capability, os.environ.get("MLA_PREFILL_FORCE", ""))


def _has_cuda_kernel() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("mla_prefill::ragged_prefill", "CUDA")
