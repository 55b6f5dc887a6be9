"""What the layer, the metadata builder and vLLM ask of a prefill backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_prefill.ops import merge_states

# (major, minor) of the accelerator; None: there is none, tensors are on the CPU.
Capability = tuple[int, int] | None


class SplitKey(NamedTuple):
    """Keys in two parts, so that the rope part, which all heads share, is never copied beside each head's own."""

    k_nope: Tensor  # [tokens, num_heads, qk_nope_head_dim]
    k_pe: Tensor  # [tokens, qk_rope_head_dim] or [tokens, 1, qk_rope_head_dim]


@dataclass(frozen=True, kw_only=True)
class MLADimensions:
    """The head dims that a backend must support. vLLM's class of this name does in its place."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: Any) -> MLADimensions:
        """The dims of whatever has these three attributes: a layer, a model's config, vLLM's own class."""
        return cls(
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
        )

    def __str__(self) -> str:
        return f"({self.qk_nope_head_dim}, {self.qk_rope_head_dim}, {self.v_head_dim})"


class MLAPrefillSelectorConfig(NamedTuple):
    """What a backend is chosen by, beside the device. None: not known, so not checked."""

    dtype: torch.dtype | None = None
    mla_dimensions: MLADimensions | None = None


def asked_of(selector_config: Any) -> tuple[torch.dtype | None, Any]:
    """dtype and dims of a selector config, of this package or of any vLLM: None where it does not name one."""
    return getattr(selector_config, "dtype", None), getattr(selector_config, "mla_dimensions", None)


def device_capability(device: torch.device | str | None = None) -> Capability:
    """Of a device, the current accelerator if None."""
    kind = torch.device(device).type if device is not None else "cuda"
    if kind != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def is_nvidia(capability: Capability) -> bool:
    """AMD's GPUs have capabilities too, gfx90a the one of Hopper."""
    return capability is not None and torch.version.hip is None


class MLAPrefillBackend(ABC):
    """Prefill attention of MLA over one step's batch.

    Built once per layer; ``clone()`` gives each metadata builder an instance of its own, whose ``prepare_metadata``
    runs once per step and serves all layers. The constructor must stay cheap and take exactly these seven arguments.
    The names and signatures are vLLM's, so a backend of this package can be one of vLLM's.

    Args:
        num_heads: query heads on this rank.
        scale: factor on the logits. The layer computed it; nothing here derives another one.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: the model's dimensions.
        vllm_config: a ``VllmConfig``, an ``EngineConfig``, or None where the backend needs neither.
    """

    supported_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    supported_mla_dimensions: ClassVar[tuple[MLADimensions, ...]] = ()  # empty: any
    compute_capabilities: ClassVar[str] = "any"  # for messages

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: Any,
    ) -> None:
        self.num_heads = num_heads
        self.scale = scale
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.vllm_config = vllm_config
        self._prefill_metadata: Any = None
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """The end of the constructor: a backend's own state. Raises ImportError where its library is missing."""

    def clone(self) -> MLAPrefillBackend:
        """A new instance with the same configuration and none of the prepared state."""
        return self.__class__(
            num_heads=self.num_heads,
            scale=self.scale,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            vllm_config=self.vllm_config,
        )

    # ---- is it usable? -----------------------------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """As it is called in logs."""

    @classmethod
    def supports_compute_capability(cls, device_capability: Capability) -> bool:
        return True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        return not cls.supported_mla_dimensions or MLADimensions.of(mla_dimensions) in cls.supported_mla_dimensions

    @classmethod
    def missing_dependency(cls) -> str | None:
        """What the backend needs and doesn't find in this Python, or None. The only place that imports a library."""
        return None

    @classmethod
    def is_available(cls) -> bool:
        return cls.missing_dependency() is None

    @classmethod
    def validate_configuration(cls, device_capability: Capability, selector_config: Any) -> list[str]:
        """Every reason why the backend can't serve this configuration; empty: it can.

        Args:
            device_capability: the accelerator's (major, minor), None for the CPU.
            selector_config: an ``MLAPrefillSelectorConfig``, of this package or vLLM's.
        """
        dtype, dims = asked_of(selector_config)
        reasons = []
        if not cls.supports_compute_capability(device_capability):
            got = "no accelerator" if device_capability is None else "{}.{}".format(*device_capability)
            reasons.append(f"compute capability: expected {cls.compute_capabilities}, got {_vendor()}{got}")
        if dtype is not None and not cls.supports_dtype(dtype):
            reasons.append(f"dtype: expected {_one_of(cls.supported_dtypes)}, got {dtype}")
        if not cls.is_available():
            reasons.append(cls.missing_dependency() or "its dependencies are not available")
        if dims is not None and not cls.supports_mla_dimensions(dims):
            expected, got = _one_of(cls.supported_mla_dimensions), MLADimensions.of(dims)
            reasons.append(f"dims (qk_nope, qk_rope, v): expected {expected}, got {got}")
        return reasons

    def supports_quant_output(self, quant_key: Any) -> bool:
        """Whether ``run_prefill_new_tokens`` takes an ``output_scale`` and writes a quantised ``out``."""
        return False

    def supports_out(self) -> bool:
        """Whether both run methods write into ``out`` and return it."""
        return False

    # ---- the work ----------------------------------------------------------------------------------------------------

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Called once per step, before the layers run. Everything that they share is computed here.

        An override calls this one: what it keeps is the step that the backend is prepared for.
        """
        self._prefill_metadata = prefill_metadata

    def expect_prepared_for(self, prefill_metadata: Any) -> None:
        """Refuses the metadata of any step but the one prepared last, whose lengths a run would take without a word.

        Raises:
            ValueError: no step was prepared, or another one after this.
        """
        if self._prefill_metadata is not prefill_metadata:
            got = "none" if self._prefill_metadata is None else "another step prepared after this one"
            raise ValueError(
                "metadata: expected the step that its backend was prepared for last "
                f"(a step runs before its builder builds the next one), got {got}"
            )

    @abstractmethod
    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor | SplitKey,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of the step's tokens over themselves.

        Args:
            q: [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim].
            k: [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], or its two parts.
            v: [tokens, num_heads, v_head_dim], strided.
            return_softmax_lse: whether to return the pair (out, lse).
            out: [tokens, num_heads, v_head_dim] in q's dtype, written in place and returned.
            output_scale: scale of a quantised output.

        Returns:
            out, or out and lse, [num_heads, tokens] float32, the natural log of the sum of the exponentials.

        Raises:
            ValueError: no step was prepared, or a tensor does not fit it.
        """

    @abstractmethod
    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: Tensor | None = None,
        k: Tensor | SplitKey | None = None,
        v: Tensor | None = None,
        out: Tensor | None = None,
        *,
        chunk_idx: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention without a mask of a chunk's query tokens over its context rows.

        Args:
            chunk: one of the prepared metadata's context chunks.
            q, out: as above, rows of the chunk's requests only (``chunk.token_slice`` of the step's).
            k, v: as above, one row per context row of the chunk.
            chunk_idx: in place of ``chunk``, as vLLM up to 0.27 has it: the chunk's index. q and out are then all
                tokens of the step.

        Returns:
            out and lse; (0, -inf) for a request that has no rows in the chunk.

        Raises:
            ValueError: no step was prepared, the chunk is not one of it, or a tensor does not fit.
        """

    def accumulate_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor | SplitKey, v: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        """Folds a chunk into the running state (out, lse) of its query tokens, in place."""
        chunk_out, chunk_lse = self.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v)
        merge_states(out, lse, chunk_out, chunk_lse, out=out, lse=lse)


def _vendor() -> str:
    return "AMD " if torch.version.hip is not None else ""


def _one_of(values: tuple[Any, ...]) -> str:
    return ("one of " if len(values) > 1 else "") + ", ".join(map(str, values))
