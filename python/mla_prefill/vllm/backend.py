"""The native backend as one of vLLM's. Works with the interfaces of vLLM 0.25 to 0.33."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mla_prefill.backends.native import NativePrefillBackend
from mla_prefill.vllm.split_key import hand_over_split_keys


class NativeMLAPrefillBackend(NativePrefillBackend, MLAPrefillBackend):
    """``NATIVE``, registered with vLLM as ``CUSTOM``."""

    _keys_are_split = False

    @staticmethod
    def get_name() -> str:
        return "MLA_PREFILL_NATIVE"

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        if not self._keys_are_split:
            # Not in the constructor: the layer enters the context after it, and other layers later still.
            hand_over_split_keys(self.vllm_config)
            self._keys_are_split = True
        super().prepare_metadata(prefill_metadata)
