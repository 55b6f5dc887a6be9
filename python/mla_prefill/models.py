"""Shapes of published MLA models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """What prefill attention needs to know about a model. ``num_heads`` counts all tensor-parallel ranks together."""

    num_heads: int
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a row of the latent cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def heads_per_rank(self, tp: int) -> int:
        """Heads of one of ``tp`` tensor-parallel ranks.

        Raises:
            ValueError: tp does not divide the heads.
        """
        if tp < 1 or self.num_heads % tp:
            raise ValueError(f"tp: expected a divisor of the {self.num_heads} heads, got {tp}")
        return self.num_heads // tp


def _yarn(factor: float, mscale_all_dim: float) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "mscale": mscale_all_dim, "mscale_all_dim": mscale_all_dim}


MODELS = {
    "deepseek-v2-lite": ModelShape(num_heads=16, rope_scaling=_yarn(40, 0.707)),
    "deepseek-v2": ModelShape(num_heads=128, rope_scaling=_yarn(40, 0.707)),
    "deepseek-v3": ModelShape(num_heads=128, rope_scaling=_yarn(40, 1.0)),
    "deepseek-v3.2": ModelShape(num_heads=128, rope_scaling=_yarn(40, 1.0)),
    "deepseek-r1": ModelShape(num_heads=128, rope_scaling=_yarn(40, 1.0)),
    "kimi-k2": ModelShape(num_heads=64, rope_scaling=_yarn(32, 1.0)),
    "kimi-k2-0905": ModelShape(num_heads=64, rope_scaling=_yarn(64, 1.0)),
    "kimi-linear": ModelShape(num_heads=32),
    "longcat-flash": ModelShape(num_heads=64),
    "ling-3.0-flash": ModelShape(num_heads=32),
    "glm-4.7-flash": ModelShape(num_heads=20, qk_nope_head_dim=192, v_head_dim=256),
    "glm-5": ModelShape(num_heads=64, qk_nope_head_dim=192, v_head_dim=256),
    "glm-5.3-flash": ModelShape(num_heads=64, qk_nope_head_dim=256, qk_rope_head_dim=0, v_head_dim=256),
    "hy4": ModelShape(num_heads=64, qk_nope_head_dim=192, v_head_dim=256),
    "hy4-preview": ModelShape(num_heads=32, qk_nope_head_dim=192, v_head_dim=256),
}


def get_model(name: str) -> ModelShape:
    """The shape of a model by its name.

    Raises:
        ValueError: the name is not in the table.
    """
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
