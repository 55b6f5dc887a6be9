"""Prefill attention of MLA models (DeepSeek V2/V3/R1, Kimi K2, GLM-5 ...) on ragged batches."""

from mla_prefill import reference
from mla_prefill.backends import (
    MLAPrefillBackend,
    MLAPrefillBackendEnum,
    NativePrefillBackend,
    SplitKey,
    get_mla_prefill_backend,
    register_mla_prefill_backend,
)
from mla_prefill.context_chunks import ContextChunk, plan_context_chunks
from mla_prefill.context_parallel import RowOrder, dcp_row_order, merge_rank_states
from mla_prefill.forward_context import EngineConfig
from mla_prefill.layer import MLAAttention
from mla_prefill.metadata import MLAMetadataBuilder
from mla_prefill.ops import gather_latent, merge_states, ragged_prefill
from mla_prefill.plan import PrefillPlan, plan_prefill
from mla_prefill.scale import softmax_scale

__version__ = "0.1.0"

__all__ = [
    "ContextChunk",
    "EngineConfig",
    "MLAAttention",
    "MLAMetadataBuilder",
    "MLAPrefillBackend",
    "MLAPrefillBackendEnum",
    "NativePrefillBackend",
    "PrefillPlan",
    "RowOrder",
    "SplitKey",
    "dcp_row_order",
    "gather_latent",
    "get_mla_prefill_backend",
    "merge_rank_states",
    "merge_states",
    "plan_context_chunks",
    "plan_prefill",
    "ragged_prefill",
    "reference",
    "register_mla_prefill_backend",
    "softmax_scale",
]
