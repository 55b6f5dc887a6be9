"""The softmax scale of MLA attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def softmax_scale(qk_head_dim: int, rope_scaling: Mapping[str, Any] | None = None) -> float:
    """The factor on ``q · k`` before the softmax: ``qk_head_dim ** -0.5``, times ``mscale ** 2`` for YaRN models.

    ``mscale = 0.1 * mscale_all_dim * ln(factor) + 1`` (1 for ``factor <= 1``) stands on q and on k: YaRN, Peng et al.,
    2023, arXiv:2309.00071, as in DeepSeek's reference code for V2 and V3. Only ``mscale_all_dim`` counts: ``mscale``
    belongs to the rotary table. No correction applies without it, to the rope type "default", or where
    ``attention_factor`` is 1 or ``apply_scale`` is false (Mistral).

    Args:
        qk_head_dim: width of a query head, nope and rope parts together.
        rope_scaling: the checkpoint's ``rope_scaling`` or ``rope_parameters``; the type is under "rope_type" or "type".

    Raises:
        ValueError: qk_head_dim below 1, or a rope_scaling whose fields don't make sense.
    """
    if qk_head_dim < 1:
        raise ValueError(f"qk_head_dim: expected at least 1, got {qk_head_dim}")
    return qk_head_dim**-0.5 * _yarn_mscale(rope_scaling or {}) ** 2


def _yarn_mscale(rope_scaling: Mapping[str, Any]) -> float:
    if not isinstance(rope_scaling, Mapping):
        raise ValueError(f"rope_scaling: expected a mapping or None, got {type(rope_scaling).__name__}")
    mscale_all_dim = _number(rope_scaling, "mscale_all_dim", default=0.0)
    if mscale_all_dim == 0.0:
        return 1.0
    rope_type = rope_scaling.get("rope_type") or rope_scaling.get("type")
    if not isinstance(rope_type, str):
        raise ValueError(
            "rope_scaling: expected the rope's type under 'rope_type' or 'type' beside 'mscale_all_dim', "
            f"got the keys {list(rope_scaling)}"
        )
    if (
        rope_type == "default"
        or rope_scaling.get("attention_factor") == 1.0
        or rope_scaling.get("apply_scale") is False
    ):
        return 1.0
    factor = _number(rope_scaling, "factor")
    return 0.1 * mscale_all_dim * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _number(rope_scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = rope_scaling.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"rope_scaling[{key!r}]: expected a finite number >= 0, got {value!r}")
    return float(value)
