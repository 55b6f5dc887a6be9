"""The softmax scale against published values, and what it refuses."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from mla_prefill.models import MODELS, get_model
from mla_prefill.scale import softmax_scale

SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh", ".hip"}
YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("deepseek-v3", 0.135234),
        ("deepseek-r1", 0.135234),
        ("deepseek-v3.2", 0.135234),
        ("deepseek-v2", 0.114721),
        ("deepseek-v2-lite", 0.114721),
        ("kimi-k2", 0.130861),
        ("kimi-k2-0905", 0.144680),
        ("kimi-linear", 0.0721688),
        ("longcat-flash", 0.0721688),
        ("glm-4.7-flash", 0.0625),
        ("glm-5", 0.0625),
        ("glm-5.3-flash", 0.0625),
    ],
)
def test_published_scales(model: str, expected: float) -> None:
    shape = get_model(model)
    assert softmax_scale(shape.qk_head_dim, shape.rope_scaling) == pytest.approx(expected, rel=5e-6)


def test_every_model_has_a_scale_and_whole_heads() -> None:
    for name, shape in MODELS.items():
        assert softmax_scale(shape.qk_head_dim, shape.rope_scaling) >= shape.qk_head_dim**-0.5, name
        assert shape.heads_per_rank(1) == shape.num_heads


def test_only_mscale_all_dim_counts() -> None:
    expected = 192**-0.5 * (0.1 * 0.5 * math.log(40) + 1) ** 2
    assert softmax_scale(192, {**YARN, "mscale": 7.0, "mscale_all_dim": 0.5}) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["yarn", "deepseek_yarn"])
def test_either_key_names_the_type(key: str, name: str) -> None:
    scaling = {key: name, "factor": 40, "mscale_all_dim": 1.0}
    assert softmax_scale(192, scaling) == pytest.approx(0.135234, rel=5e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {},
        {"rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "type": "yarn", "factor": 40, "mscale_all_dim": 1.0},
        {"type": "yarn", "factor": 40},
        {**YARN, "mscale_all_dim": 0},
        {**YARN, "mscale_all_dim": None},
        {**YARN, "factor": 1.0},
        {**YARN, "factor": 0.5},
        {**YARN, "attention_factor": 1.0},
        {**YARN, "apply_scale": False},
        {**YARN, "apply_yarn_scaling": False},
        {"rope_type": "yarn", "factor": 36, "mscale_all_dim": 1, "apply_yarn_scaling": False},
        {"rope_type": "deepseek_llama_scaling", "factor": 36, "mscale_all_dim": 1},
        {**YARN, "apply_scale": True, "apply_yarn_scaling": False},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
)
def test_no_correction(scaling: dict | None) -> None:
    assert softmax_scale(192, scaling) == 192**-0.5


@pytest.mark.parametrize(
    "scaling",
    [
        {**YARN, "attention_factor": 1.5},
        {**YARN, "apply_scale": True},
        {**YARN, "apply_yarn_scaling": True},
        {**YARN, "apply_scale": None, "attention_factor": None},
        {
            **YARN,
            **{"rope_theta": 10000, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32, "beta_slow": 1, "truncate": False, "llama_4_scaling_beta": 0.1},
        },
    ],
)
def test_correction_stays(scaling: dict) -> None:
    assert softmax_scale(192, scaling) == softmax_scale(192, YARN)


@pytest.mark.parametrize(
    ("qk_head_dim", "scaling", "message"),
    [
        (0, None, "qk_head_dim: expected at least 1, got 0"),
        (192, ["yarn"], "rope_scaling: expected a mapping or None, got list"),
        (192, {"factor": 40, "mscale_all_dim": 1.0}, "expected the rope's type under 'rope_type' or 'type'"),
        (192, {"type": "yarn", "mscale_all_dim": 1.0}, r"rope_scaling\['factor'\]: expected .*, got None"),
        (192, {**YARN, "factor": "40"}, r"rope_scaling\['factor'\]: expected .*, got '40'"),
        (192, {**YARN, "factor": math.inf}, r"rope_scaling\['factor'\]: expected .*, got inf"),
        (192, {**YARN, "mscale_all_dim": -1.0}, r"rope_scaling\['mscale_all_dim'\]: expected .*, got -1.0"),
        (192, {**YARN, "mscale_all_dim": 1e300}, r"rope_scaling: expected fields that give a finite scale, got .*e\+"),
        (192, {**YARN, "attention_factor": "1"}, r"rope_scaling\['attention_factor'\]: expected .*, got '1'"),
        (192, {**YARN, "apply_scale": "false"}, r"rope_scaling\['apply_scale'\]: expected true or false, got 'false'"),
        (
            192,
            {**YARN, "apply_yarn_scaling": 0.5},
            r"rope_scaling\['apply_yarn_scaling'\]: expected true or false, got",
        ),
        (192, {**YARN, "type": "linear"}, "rope_scaling: expected one of the types yarn, .*, got 'linear'"),
        (192, {**YARN, "type": "telechat3-yarn"}, "expected one of the types yarn, .*, got 'telechat3-yarn'"),
        (192, {**YARN, "rope_type": ["yarn"]}, r"expected one of the types yarn, .*, got \['yarn'\]"),
        (
            192,
            {**YARN, "softmax_scale": 0.1},
            r"rope_scaling: expected keys that are known .*, got \['softmax_scale'\]",
        ),
        (192, {"attn_factor": 2.0}, r"rope_scaling: expected keys that are known .*, got \['attn_factor'\]"),
        (192, {"rope_type": "default", "q_scale": 2.0}, r"rope_scaling: expected keys that are known .*'q_scale'"),
        (
            192,
            {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}},
            r"parameters of one layer type .*, got several under \['full_attention', 'sliding_attention'\]",
        ),
        (192, {"full_attention": YARN, "sliding_attention": None}, r"one layer type .* under \['full_attention'\]"),
        (192, {"full_attention": {}}, r"one layer type .* under \['full_attention'\]"),
    ],
)
def test_refusals_name_what_is_wrong(qk_head_dim: int, scaling: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        softmax_scale(qk_head_dim, scaling)


def test_unknown_model_and_ranks() -> None:
    with pytest.raises(ValueError, match=r"model: expected one of deepseek-v2-lite, .*, got 'gpt-2'"):
        get_model("gpt-2")
    with pytest.raises(ValueError, match="tp: expected a divisor of the 20 heads, got 8"):
        get_model("glm-4.7-flash").heads_per_rank(8)


def test_no_other_place_derives_a_scale() -> None:
    """A20: a second formula is where the first one's YaRN part gets lost."""
    root = Path(__file__).resolve().parent.parent
    derives = re.compile(r"sqrt|\*\* ?\(?-? ?(?:0?\.5|1 ?/ ?2)|mscale")
    # The standard deviation of random weights; YaRN's fields in the table of models.
    allowed = {"python/mla_prefill/cli/replay.py": "kv_lora_rank", "python/mla_prefill/models.py": "def _yarn|return {"}
    sources = [path for folder in ("python", "csrc") for path in (root / folder).rglob("*") if path.suffix in SOURCES]
    assert len(sources) > 50
    for path in sources:
        name = path.relative_to(root).as_posix()
        if name == "python/mla_prefill/scale.py":
            continue
        for line in path.read_text().splitlines():
            if derives.search(line) and not line.lstrip().startswith(('"""', "#", "//")):
                assert re.search(allowed.get(name, "$^"), line), f"{name}: {line.strip()}"
