"""FLASHINFER: the ragged wrapper, planned once per step for all layers."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_prefill.backends.adapter import AdapterBackend, LiveBatch, load
from mla_prefill.backends.base import Capability, MLADimensions, MLAPrefillBackend, device_capability, is_nvidia

_WRAPPER = ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper")
WORKSPACE_BYTES = 384 << 20  # the library's advice is 128 MiB; its split-KV scratch outgrew that for others
_KERNELS = {8: "fa2", 9: "fa3", 10: "cutlass"}  # by the capability's major; its own choice may not return an lse


class GlobalHyperparameters(NamedTuple):
    """What the one plan of a step is made for, so all layers must have it in common."""

    scale: float
    num_heads: int
    head_dims: str


class FlashInferPrefillBackend(AdapterBackend):
    """FLASHINFER. Its lse is base 2 and [tokens, heads]; V goes in as it is."""

    supported_mla_dimensions: ClassVar[tuple[MLADimensions, ...]] = (
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    )
    compute_capabilities: ClassVar[str] = "8.x, 9.x or 10.x"

    def _set_up(self) -> None:
        if reason := self.missing_dependency():
            raise ImportError(f"FLASHINFER: {reason}")
        self._hyperparameters: GlobalHyperparameters | None = None
        self._workspace: Tensor | None = None
        self._wrappers: list[Any] = []  # one for each call of a step, kept for the next

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @classmethod
    def supports_compute_capability(cls, device_capability: Capability) -> bool:
        return is_nvidia(device_capability) and device_capability[0] in _KERNELS

    @classmethod
    def missing_dependency(cls) -> str | None:
        return missing_flashinfer(*_WRAPPER)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        # Not in the constructor, where the model's later layers don't exist yet.
        if self._hyperparameters is None:
            self._hyperparameters = global_hyperparameters(self.vllm_config)
        if self._workspace is None:
            self._workspace = torch.empty(
                WORKSPACE_BYTES, dtype=torch.uint8, device=prefill_metadata.query_start_loc.device
            )
        super().prepare_metadata(prefill_metadata)

    def _prepare(self, index: int, batch: LiveBatch, dtype: torch.dtype) -> Any:
        while len(self._wrappers) <= index:
            self._wrappers.append(self._new_wrapper())
        wrapper = self._wrappers[index]
        wrapper.plan(
            # From the host: the library would fetch them from the device, and wait.
            qo_indptr=_indptr(batch.q_lens),
            kv_indptr=_indptr(batch.k_lens),
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim_qk=self.qk_nope_head_dim + self.qk_rope_head_dim,
            head_dim_vo=self.v_head_dim,
            causal=batch.causal,
            sm_scale=self._hyperparameters.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            disable_split_kv=True,  # a split depends on the rest of the batch
        )
        return wrapper

    def _new_wrapper(self) -> Any:
        wrapper_class, _ = load(*_WRAPPER)
        capability = device_capability(self._workspace.device)
        return wrapper_class(self._workspace, "NHD", backend=_KERNELS[capability[0]])

    def _run(
        self, batch: LiveBatch, prepared: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        result = prepared.run(q, k, v, out=out, return_lse=return_lse)
        return natural_heads_first(result) if return_lse else (result, None)


def natural_heads_first(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) with the lse of [tokens, heads] in base 2 as [heads, tokens] in base e."""
    out, lse = result
    return out, (lse * math.log(2)).t()


def missing_flashinfer(module: str, name: str) -> str | None:
    """Why FlashInfer can't be used, or None."""
    found, problem = load(module, name)
    return None if found is not None else f"package: expected flashinfer-python with {name}, got {problem or 'none'}"


def global_hyperparameters(vllm_config: Any) -> GlobalHyperparameters:
    """What the layers registered in ``static_forward_context`` have in common.

    Raises:
        ValueError: no layer with a prefill backend is registered, or the layers disagree.
    """
    compilation_config = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation_config, "static_forward_context", {})
    found = {
        name: GlobalHyperparameters(backend.scale, backend.num_heads, str(MLADimensions.of(backend)))
        for name, backend in ((name, getattr(layer, "prefill_backend", None)) for name, layer in layers.items())
        if isinstance(backend, MLAPrefillBackend)
    }
    if not found:
        raise ValueError(
            "static_forward_context: expected at least one layer with a prefill backend, "
            f"got {list(layers) or 'no layers'}"
        )
    (first, expected), *others = found.items()
    for name, got in others:
        if got != expected:
            raise ValueError(f"static_forward_context: expected {name} to have {expected} like {first}, got {got}")
    return expected


def _indptr(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
