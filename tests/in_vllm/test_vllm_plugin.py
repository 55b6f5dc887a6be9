"""The plugin in vLLM's registry and selector."""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backends.mla.prefill.base", reason="vLLM is not installed: make test-vllm")
import vllm.platforms
from vllm.config import VllmConfig
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

import mla_prefill.vllm
from mla_prefill.backends import native
from mla_prefill.vllm import auto, plugin
from mla_prefill.vllm.backend import NativeMLAPrefillBackend

CUSTOM = MLAPrefillBackendEnum.CUSTOM
DEEPSEEK = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
GLM = MLADimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
MINICPM = MLADimensions(qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
ODD = MLADimensions(qk_nope_head_dim=100, qk_rope_head_dim=64, v_head_dim=128)
TURING, HOPPER, BLACKWELL = DeviceCapability(7, 5), DeviceCapability(9, 0), DeviceCapability(10, 0)


class Original(MLAPrefillBackend):
    """Stands for vLLM's FlashAttention backend, which needs its extension."""

    @staticmethod
    def get_name() -> str:
        return "ORIGINAL"

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        raise NotImplementedError

    def run_prefill_context_chunk(self, chunk, q, k, v, out=None):
        raise NotImplementedError


class Hopper(Platform):
    _enum = PlatformEnum.CUDA

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return HOPPER


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and this package believe in an H200 with a CUDA build."""
    monkeypatch.setattr(vllm.platforms, "current_platform", Hopper())
    monkeypatch.setattr(native, "_has_cuda_kernel", lambda: True)
    monkeypatch.setattr(native, "_cuda_kernels", lambda capability: (["sm90", "sm80"], ""))
    monkeypatch.setattr(auto._InsteadOf, "original", classmethod(lambda cls: Original))
    auto._warn_once.cache_clear()


def config(
    dims: MLADimensions = DEEPSEEK, dtype: torch.dtype = torch.bfloat16, chosen: object = None
) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=dims),
        attention_config=SimpleNamespace(mla_prefill_backend=chosen),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def construct(backend_class: type, vllm_config: SimpleNamespace) -> MLAPrefillBackend:
    dims = vllm_config.model_config.hf_text_config
    return backend_class(num_heads=16, scale=0.1, kv_lora_rank=512, vllm_config=vllm_config, **vars(dims))


def test_vllm_finds_the_plugin_and_the_class() -> None:
    """In a fresh process, by nothing but the installed package's entry point."""
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum as E\n"
        "print(E.CUSTOM.get_class().get_name(), E.FLASH_ATTN.is_overridden(), E.CPU.is_overridden())\n"
    )
    for mode, expected in (("", "MLA_PREFILL_NATIVE False False"), ("auto", "MLA_PREFILL_NATIVE True True")):
        environment = {**os.environ, "MLA_PREFILL_VLLM": mode}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert result.stdout.splitlines()[-1:] == [expected], result.stderr


@pytest.mark.parametrize("mode", ["custom", "auto"])
def test_registering_twice_is_as_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", mode)
    for _ in range(2):
        mla_prefill.vllm.register()
        assert CUSTOM.get_class() is NativeMLAPrefillBackend
        assert MLAPrefillBackendEnum.CPU.is_overridden() == (mode == "auto")
    assert pickle.loads(pickle.dumps(CUSTOM)) is CUSTOM


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", "always")
    with pytest.raises(ValueError, match="MLA_PREFILL_VLLM: expected auto or custom, got 'always'"):
        mla_prefill.vllm.register()
    assert not CUSTOM.is_overridden()


def test_another_custom_backend_stays(caplog: pytest.LogCaptureFixture) -> None:
    register_mla_prefill_backend(CUSTOM, f"{__name__}.Original")
    mla_prefill.vllm.register()
    assert CUSTOM.get_path() == f"{__name__}.Original"
    assert f"CUSTOM is {__name__}.Original already" in caplog.text


def test_the_backend_is_one_of_vllm() -> None:
    assert issubclass(NativeMLAPrefillBackend, MLAPrefillBackend)
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (NativeMLAPrefillBackend, MLAPrefillBackend))
    assert list(ours) == list(theirs)
    backend = construct(NativeMLAPrefillBackend, config())
    clone = backend.clone()
    assert type(clone) is NativeMLAPrefillBackend and clone is not backend
    assert {**vars(clone)} == {**vars(backend)}
    assert backend.supports_out() and not backend.supports_quant_output(object())


@pytest.mark.parametrize(
    ("capability", "dtype", "dims", "reasons"),
    [
        (None, torch.bfloat16, DEEPSEEK, []),
        (None, torch.float32, GLM, []),
        (HOPPER, torch.float16, DEEPSEEK, []),
        (None, torch.float8_e4m3fn, DEEPSEEK, ["dtype: expected one of .*, got torch.float8_e4m3fn"]),
        (HOPPER, torch.float32, DEEPSEEK, ["dtype: expected one of .* on a GPU, got torch.float32"]),
        (HOPPER, torch.bfloat16, GLM, []),
        (HOPPER, torch.bfloat16, ODD, [r"dims \(qk_nope, qk_rope, v\): expected .* got \(100, 64, 128\)"]),
        (BLACKWELL, torch.bfloat16, DEEPSEEK, []),
        (TURING, torch.bfloat16, DEEPSEEK, ["compute capability: expected 8.0 and above or the CPU, got 7.5"]),
    ],
)
def test_reasons(hopper, capability, dtype, dims, reasons) -> None:
    got = NativeMLAPrefillBackend.validate_configuration(capability, MLAPrefillSelectorConfig(dtype, dims))
    assert len(got) == len(reasons)
    for reason, pattern in zip(got, reasons, strict=True):
        assert re.match(pattern, reason), reason


def test_the_selector_takes_an_explicit_choice(hopper) -> None:
    mla_prefill.vllm.register()
    assert get_mla_prefill_backend(config(chosen=CUSTOM)) is NativeMLAPrefillBackend
    with pytest.raises(ValueError, match=r"CUSTOM is not valid .*got \(100, 64, 128\)"):
        get_mla_prefill_backend(config(ODD, chosen=CUSTOM))
    with pytest.raises(ValueError, match=r"CUSTOM is not valid .*got torch.float32"):
        get_mla_prefill_backend(config(dtype=torch.float32, chosen=CUSTOM))


def test_auto_gives_native_where_it_suits_and_vllm_elsewhere(hopper, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", "auto")
    mla_prefill.vllm.register()
    for dims in (DEEPSEEK, GLM, MINICPM, ODD):
        expected = NativeMLAPrefillBackend if dims in (DEEPSEEK, GLM) else Original
        vllm_config = config(dims)
        backend = construct(get_mla_prefill_backend(vllm_config), vllm_config)
        assert type(backend) is type(backend.clone()) is expected
    assert "leaves layers to FLASH_ATTN: only its portable kernel would serve" in caplog.text
    assert "leaves layers to FLASH_ATTN: dims (qk_nope, qk_rope, v): expected (128, 64, 128), (64, 64, " in caplog.text


def test_auto_leaves_an_explicit_choice_alone(hopper, monkeypatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_VLLM", "auto")
    mla_prefill.vllm.register()
    vllm_config = config(chosen=MLAPrefillBackendEnum.FLASH_ATTN)
    assert type(construct(get_mla_prefill_backend(vllm_config), vllm_config)) is Original


def test_auto_counts_after_a_first_choice_too(hopper, monkeypatch) -> None:
    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, f"{__name__}.Original")
    assert get_mla_prefill_backend(config()).get_name() == "ORIGINAL"
    monkeypatch.setenv("MLA_PREFILL_VLLM", "auto")
    mla_prefill.vllm.register()
    assert get_mla_prefill_backend(config()).get_name() == "MLA_PREFILL_NATIVE"


def test_original_is_vllms_own_class() -> None:
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, plugin.DEFAULTS["CPU"])
    assert MLAPrefillBackendEnum.CPU.get_class() is auto.InsteadOfCPU
    assert auto.InsteadOfCPU.original() is CPUSDPAMLAPrefillBackend


def test_our_layer_takes_the_configuration_of_vllm() -> None:
    vllm_config = VllmConfig()
    object.__setattr__(vllm_config, "model_config", config(DEEPSEEK, torch.float32).model_config)
    layer = mla_prefill.MLAAttention(
        num_heads=2, kv_lora_rank=512, kv_b_proj=torch.nn.Linear(512, 512), prefix="layer", vllm_config=vllm_config,
        **vars(DEEPSEEK),
    )  # fmt: skip
    assert vllm_config.compilation_config.static_forward_context == {"layer": layer}
    assert type(layer.prefill_backend) is native.NativePrefillBackend
    builder = mla_prefill.MLAMetadataBuilder(["layer"], vllm_config, block_size=16, dtype=torch.float32)
    assert builder.prefill_backend.vllm_config is vllm_config


def test_at_import_only_the_light_part_of_vllm_is_needed() -> None:
    """prefill.base and prefill.registry: they need torch alone, and exist in all versions."""
    allowed = {f"vllm.v1.attention.backends.mla.prefill.{name}" for name in ("base", "registry")}
    for path in Path(mla_prefill.vllm.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        assert {name for name in imported if name.split(".")[0] == "vllm"} <= allowed, path.name
