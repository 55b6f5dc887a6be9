"""What layers, builders and the profiler share during a forward pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class CompilationConfig:
    static_forward_context: dict[str, Any] = field(default_factory=dict)  # layer name -> layer


@dataclass
class AttentionConfig:
    mla_prefill_backend: Any = None  # a backend's name or its member of MLAPrefillBackendEnum; None: choose


@dataclass
class DeviceConfig:
    device: torch.device | str = "auto"  # where the layers run; "auto": the current accelerator, or the CPU


@dataclass
class ModelConfig:
    dtype: torch.dtype | None = None  # of the layers' inputs
    hf_text_config: Any = None  # has qk_nope_head_dim, qk_rope_head_dim and v_head_dim


@dataclass
class EngineConfig:
    """The part of vLLM's ``VllmConfig`` that this package reads. A ``VllmConfig`` does in its place."""

    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    model_config: ModelConfig | None = None


def register_layer(vllm_config: Any, name: str, layer: torch.nn.Module) -> None:
    """Enters a layer in the config's ``static_forward_context``.

    Raises:
        ValueError: the name is taken.
    """
    layers = vllm_config.compilation_config.static_forward_context
    if name in layers:
        raise ValueError(f"Duplicate layer name: {name}")
    layers[name] = layer


@dataclass
class StageClock:
    """Seconds spent in each stage of the layers that run while the clock is active.

    Host time. ``synchronize``, called at both ends of a stage, makes it mean something on an asynchronous device.
    """

    synchronize: Callable[[], None] = lambda: None
    seconds: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _active_clock.set(self)
        try:
            yield
        finally:
            _active_clock.reset(token)


_active_clock: ContextVar[StageClock | None] = ContextVar("mla_prefill_stage_clock", default=None)


class stage:
    """Marks a stage of the layer: a profiler range ``mla_prefill::<name>``, and host time where a clock is active.

    Next to nothing where neither a profiler nor a clock looks: a layer enters half a dozen of them.
    """

    __slots__ = ("_begin", "_clock", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._clock = _active_clock.get()
        self._range = None
        if torch.autograd._profiler_enabled():
            self._range = torch.profiler.record_function(f"mla_prefill::{self._name}")
            self._range.__enter__()
        if self._clock is not None:
            self._clock.synchronize()
            self._begin = time.perf_counter()

    def __exit__(self, *exception: Any) -> None:
        if self._clock is not None:
            self._clock.synchronize()
            self._clock.seconds[self._name] += time.perf_counter() - self._begin
        if self._range is not None:
            self._range.__exit__(*exception)
