"""The native backend inside vLLM. vLLM finds ``register`` through the entry point ``vllm.general_plugins``."""

from mla_prefill.vllm.plugin import register

__all__ = ["register"]
