"""The softmax scale of MLA attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_CORRECTED_TYPES = ("yarn", "deepseek_yarn")
_UNCORRECTED_TYPES = ("default", "deepseek_llama_scaling")

# The keys that decide about the scale, and those that are known not to: they shape the rotary table, or (the last one)
# say how q grows with its position.
_SCALE_KEYS = frozenset(
    ("rope_type", "type", "factor", "mscale_all_dim", "attention_factor", "apply_scale", "apply_yarn_scaling")
)
_OTHER_KEYS = frozenset(
    (
        *("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("mscale", "beta_fast", "beta_slow", "truncate", "extrapolation_factor", "finetuned"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "alpha"),
        *("mrope_section", "mrope_interleaved", "llama_4_scaling_beta"),
    )
)


def softmax_scale(qk_head_dim: int, rope_scaling: Mapping[str, Any] | None = None) -> float:
    """The factor on ``q · k`` before the softmax: ``qk_head_dim ** -0.5``, times ``mscale ** 2`` for YaRN models.

    ``mscale = 0.1 * mscale_all_dim * ln(factor) + 1`` (1 for ``factor <= 1``) stands on q and on k: YaRN, Peng et al.,
    2023, arXiv:2309.00071, as in DeepSeek's reference code for V2 and V3. Only ``mscale_all_dim`` counts: ``mscale``
    belongs to the rotary table. No correction applies without it, to the rope types "default" and
    "deepseek_llama_scaling", or where ``attention_factor`` is 1 or one of ``apply_scale`` and ``apply_yarn_scaling`` is
    false (Mistral, in the checkpoint's and in vLLM's words). A key that is not known to leave the scale alone is
    refused, never ignored.

    Args:
        qk_head_dim: width of a query head, nope and rope parts together.
        rope_scaling: the checkpoint's ``rope_scaling`` or ``rope_parameters``; the type is under "rope_type" or "type".
            Of parameters that are nested by layer type, those of the layer's own type.

    Raises:
        ValueError: qk_head_dim below 1, a rope_scaling with unknown or nested keys or with fields that don't make
            sense.
    """
    if qk_head_dim < 1:
        raise ValueError(f"qk_head_dim: expected at least 1, got {qk_head_dim}")
    mscale = _yarn_mscale(rope_scaling or {})
    scale = qk_head_dim**-0.5 * mscale * mscale
    if not math.isfinite(scale):
        raise ValueError(f"rope_scaling: expected fields that give a finite scale, got mscale {mscale:.3g}")
    return scale


def _yarn_mscale(rope_scaling: Mapping[str, Any]) -> float:
    if not isinstance(rope_scaling, Mapping):
        raise ValueError(f"rope_scaling: expected a mapping or None, got {type(rope_scaling).__name__}")
    if nested := [key for key, value in rope_scaling.items() if isinstance(value, Mapping)]:
        raise ValueError(
            "rope_scaling: expected the parameters of one layer type ('rope_type', 'factor' ...), got several under "
            f"{nested}: pass those of the layer's own type"
        )
    if unknown := [key for key in rope_scaling if key not in _SCALE_KEYS | _OTHER_KEYS]:
        raise ValueError(
            f"rope_scaling: expected keys that are known to set the scale, {', '.join(sorted(_SCALE_KEYS))}, or not to "
            f"touch it, {', '.join(sorted(_OTHER_KEYS))}, got {unknown}: leave out what does not change the scale"
        )
    mscale_all_dim = _number(rope_scaling, "mscale_all_dim", default=0.0)
    attention_factor = _number(rope_scaling, "attention_factor", default=0.0)
    is_applied = [_flag(rope_scaling, key) for key in ("apply_scale", "apply_yarn_scaling")]
    if mscale_all_dim == 0.0:
        return 1.0
    rope_type = rope_scaling.get("rope_type") or rope_scaling.get("type")
    if rope_type is None:
        raise ValueError(
            "rope_scaling: expected the rope's type under 'rope_type' or 'type' beside 'mscale_all_dim', "
            f"got the keys {list(rope_scaling)}"
        )
    if rope_type not in (*_CORRECTED_TYPES, *_UNCORRECTED_TYPES):
        raise ValueError(
            f"rope_scaling: expected one of the types {', '.join((*_CORRECTED_TYPES, *_UNCORRECTED_TYPES))} beside "
            f"'mscale_all_dim', got {rope_type!r}"
        )
    if rope_type in _UNCORRECTED_TYPES or attention_factor == 1.0 or not all(is_applied):
        return 1.0
    factor = _number(rope_scaling, "factor")
    return 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _flag(rope_scaling: Mapping[str, Any], key: str) -> bool:
    value = rope_scaling.get(key)
    if value not in (None, True, False):
        raise ValueError(f"rope_scaling[{key!r}]: expected true or false, got {value!r}")
    return value is None or bool(value)


def _number(rope_scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = rope_scaling.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"rope_scaling[{key!r}]: expected a finite number >= 0, got {value!r}")
    return float(value)
