"""The registry, the selector, and what each backend says about itself."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import mla_prefill
from mla_prefill import MLAPrefillBackendEnum, get_mla_prefill_backend, register_mla_prefill_backend
from mla_prefill.backends import (
    MLADimensions,
    MLAPrefillBackend,
    MLAPrefillSelectorConfig,
    NativePrefillBackend,
    base,
    native,
    registry,
    selector,
)
from mla_prefill.backends.sdpa import SdpaPrefillBackend
from mla_prefill.forward_context import AttentionConfig, DeviceConfig, EngineConfig, ModelConfig

DEEPSEEK = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
EVEN = MLADimensions(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128)
NO_ROPE = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=0, v_head_dim=128)
GLM = MLADimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
MINICPM = MLADimensions(qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
ODD = MLADimensions(qk_nope_head_dim=100, qk_rope_head_dim=64, v_head_dim=128)
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
CUSTOM = MLAPrefillBackendEnum.CUSTOM
ADAPTERS = ("FLASH_ATTN", "FLASHINFER", "TRTLLM_RAGGED")


class Mine(NativePrefillBackend):
    @staticmethod
    def get_name() -> str:
        return "MINE"


MINE = f"{__name__}.Mine"


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    before = set(MLAPrefillBackendEnum.__members__)
    selector._log_choice.cache_clear()
    yield
    registry._overrides.clear()
    for name in set(MLAPrefillBackendEnum.__members__) - before:
        del MLAPrefillBackendEnum._member_map_[name]
        MLAPrefillBackendEnum._member_names_.remove(name)
        type.__delattr__(MLAPrefillBackendEnum, name)
    registry._changed()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the selector believes to be there: ``capability``, and whether libraries and CUDA kernels are installed."""
    fake = SimpleNamespace(capability=None, libraries=True, cuda_build=True, kernels=(["sm90", "sm80"], ""))
    monkeypatch.setattr(selector, "device_capability", lambda device=None: fake.capability)
    monkeypatch.setattr(native, "_has_cuda_kernel", lambda: fake.cuda_build)
    monkeypatch.setattr(native, "_cuda_kernels", lambda capability: fake.kernels)
    for name in ADAPTERS:
        backend_class = MLAPrefillBackendEnum[name].get_class()
        missing = classmethod(lambda cls: None if fake.libraries else "package: expected it, got none")
        monkeypatch.setattr(backend_class, "missing_dependency", missing)
    monkeypatch.setattr(sys.modules["mla_prefill.backends.flash_attn"], "load", lambda module, name: (print, ""))
    return fake


def config(
    dims: MLADimensions | None = DEEPSEEK, dtype: torch.dtype | None = torch.bfloat16, chosen: object = None
) -> EngineConfig:
    return EngineConfig(attention_config=AttentionConfig(chosen), model_config=ModelConfig(dtype, dims))


# ---- registry --------------------------------------------------------------------------------------------------------


def test_members_and_their_classes() -> None:
    assert list(MLAPrefillBackendEnum.__members__) == ["NATIVE", *ADAPTERS, "SDPA", "CUSTOM"]
    for member in MLAPrefillBackendEnum:
        if member is not CUSTOM:
            backend_class = member.get_class()
            assert issubclass(backend_class, MLAPrefillBackend) and backend_class.get_name() == member.name
            assert f"{backend_class.__module__}.{backend_class.__qualname__}" == member.get_path() == member.value
    assert MLAPrefillBackendEnum.NATIVE.get_class() is NativePrefillBackend


def test_constructors_take_seven_arguments() -> None:
    """No device and no layer names; a backend works out what else it needs when the first step is prepared."""
    for member in MLAPrefillBackendEnum:
        if member is not CUSTOM:
            assert list(inspect.signature(member.get_class()).parameters) == [
                "num_heads", "scale", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                "vllm_config",
            ]  # fmt: skip


def test_custom_must_be_registered() -> None:
    for method in (CUSTOM.get_path, CUSTOM.get_class):
        with pytest.raises(ValueError, match="expected CUSTOM to be registered before it is used, got nothing: call"):
            method()
    register_mla_prefill_backend(CUSTOM, MINE)
    assert CUSTOM.get_class() is Mine and CUSTOM.get_path() == MINE and CUSTOM.is_overridden()
    CUSTOM.clear_override()
    assert not CUSTOM.is_overridden()
    with pytest.raises(ValueError, match="to be registered"):
        CUSTOM.get_class()


def test_a_member_can_be_replaced_and_restored() -> None:
    member = MLAPrefillBackendEnum.FLASH_ATTN
    register_mla_prefill_backend(member, MINE)
    assert member.get_class() is Mine and member.is_overridden()
    member.clear_override()
    assert member.get_path() == member.value and not member.is_overridden()


@pytest.mark.parametrize("backend", [CUSTOM, "DECORATED"])
def test_decorator(backend: object) -> None:
    @register_mla_prefill_backend(backend)
    class Decorated(Mine):
        pass

    member = CUSTOM if backend is CUSTOM else MLAPrefillBackendEnum[backend]
    assert member.get_class() is Decorated
    assert member.get_path() == f"{__name__}.{Decorated.__qualname__}"


def test_a_new_name_becomes_a_member() -> None:
    for _ in range(2):  # a plugin runs in every process, maybe twice
        register_mla_prefill_backend("MINE", MINE)
    member = MLAPrefillBackendEnum["MINE"]
    assert member is MLAPrefillBackendEnum.MINE and member in list(MLAPrefillBackendEnum)
    assert member.get_class() is Mine and member.name == "MINE"
    assert get_mla_prefill_backend(config(chosen="mine")) is Mine


def test_a_name_that_is_taken() -> None:
    register_mla_prefill_backend("MINE", MINE)
    with pytest.raises(ValueError, match=rf"expected a new name, got 'MINE', which stands for {MINE}; pass MLAPrefill"):
        register_mla_prefill_backend("MINE", "other.Class")
    with pytest.raises(ValueError, match="expected a new name, got 'NATIVE'"):
        register_mla_prefill_backend("NATIVE", MINE)
    with pytest.raises(ValueError, match="expected a new name, got 'CUSTOM'"):
        register_mla_prefill_backend("CUSTOM", MINE)
    assert MLAPrefillBackendEnum.MINE.get_class() is Mine


@pytest.mark.parametrize("name", ["mine", "NOT-A-NAME", "", "__members__"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ValueError, match="backend: expected an upper-case identifier, got"):
        register_mla_prefill_backend(name, MINE)


@pytest.mark.parametrize("path", ["Class", "", "package.", ".Class", "a b.Class"])
def test_a_path_that_is_none(path: str) -> None:
    with pytest.raises(ValueError, match=r"class_path: expected package\.module\.Class, got"):
        register_mla_prefill_backend("MINE", path)
    assert "MINE" not in MLAPrefillBackendEnum.__members__


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"expected one of NATIVE, FLASH_ATTN, .*, SDPA, CUSTOM, got 'FLASH'"):
        MLAPrefillBackendEnum["FLASH"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module.Class", "CUSTOM: expected a class at no_such_module.Class, got No module named"),
        ("mla_prefill.backends.native.Nothing", "CUSTOM: expected a class at .*, got .*has no attribute 'Nothing'"),
        ("mla_prefill.backends.native.plan_prefill", "CUSTOM: expected a class at .*, got function"),
    ],
)
def test_a_path_without_a_class(path: str, message: str) -> None:
    register_mla_prefill_backend(CUSTOM, path)
    with pytest.raises(ImportError, match=message):
        CUSTOM.get_class()
    with pytest.raises(ValueError, match=message):
        get_mla_prefill_backend(config(chosen=CUSTOM))


def test_members_cross_process_boundaries_by_name() -> None:
    register_mla_prefill_backend("MINE", MINE)
    for member in MLAPrefillBackendEnum:
        assert pickle.loads(pickle.dumps(member)) is member
    code = f"import pickle, mla_prefill\npickle.loads({pickle.dumps(MLAPrefillBackendEnum.MINE)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ValueError: backend: expected one of NATIVE, " in result.stderr and "got 'MINE'" in result.stderr


# ---- reasons ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "dims", "reasons"),
    [
        ("NATIVE", None, torch.float32, GLM, []),
        ("NATIVE", HOPPER, torch.float16, DEEPSEEK, []),
        ("NATIVE", HOPPER, None, None, []),
        ("NATIVE", HOPPER, torch.bfloat16, GLM, []),
        ("NATIVE", AMPERE, torch.bfloat16, DEEPSEEK, []),
        ("NATIVE", BLACKWELL, torch.float16, MINICPM, []),
        ("NATIVE", (7, 5), torch.float16, DEEPSEEK, ["compute capability: expected 8.0 and above or the CPU, got 7.5"]),
        (
            "NATIVE",
            HOPPER,
            torch.float32,
            ODD,
            ["dtype: .* on a GPU, got torch.float32", r"dims .* got \(100, 64, 128"],
        ),
        ("NATIVE", None, torch.float64, DEEPSEEK, ["dtype: expected one of .*, got torch.float64"]),
        ("FLASH_ATTN", HOPPER, torch.bfloat16, GLM, []),
        ("FLASH_ATTN", (7, 5), torch.bfloat16, GLM, ["compute capability: expected 8.0 to 12.x, .*, got 7.5"]),
        ("FLASHINFER", BLACKWELL, torch.bfloat16, DEEPSEEK, []),
        ("FLASHINFER", (12, 0), torch.float32, GLM, ["compute capability: .* 12.0", "dtype: ", "dims "]),
        ("TRTLLM_RAGGED", BLACKWELL, torch.bfloat16, GLM, []),
        ("TRTLLM_RAGGED", HOPPER, torch.bfloat16, DEEPSEEK, ["compute capability: expected 10.x, got 9.0"]),
        ("TRTLLM_RAGGED", None, torch.bfloat16, DEEPSEEK, ["compute capability: expected 10.x, got no accelerator"]),
        ("SDPA", None, torch.float32, GLM, []),
        ("SDPA", (7, 5), torch.float16, MLADimensions(qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=1), []),
        ("SDPA", HOPPER, torch.float8_e4m3fn, GLM, ["dtype: expected one of .*, got torch.float8_e4m3fn"]),
    ],
)
def test_reasons(device, name, capability, dtype, dims, reasons) -> None:
    selector_config = MLAPrefillSelectorConfig(dtype, dims)
    got = MLAPrefillBackendEnum[name].get_class().validate_configuration(capability, selector_config)
    assert len(got) == len(reasons), got
    for reason, expected in zip(got, reasons, strict=True):
        assert re.match(expected, reason), reason


def test_all_reasons_are_given(device) -> None:
    device.libraries = False
    selector_config = MLAPrefillSelectorConfig(torch.float32, GLM)
    reasons = MLAPrefillBackendEnum.FLASHINFER.get_class().validate_configuration((7, 0), selector_config)
    assert [reason.split(":")[0] for reason in reasons] == [
        "compute capability", "dtype", "package", "dims (qk_nope, qk_rope, v)",
    ]  # fmt: skip


def test_a_build_without_cuda_kernels(device) -> None:
    device.cuda_build = False
    (reason,) = NativePrefillBackend.validate_configuration(HOPPER, MLAPrefillSelectorConfig())
    assert reason.startswith("build: expected one with CUDA kernels, got")


def test_a_build_without_code_for_the_device(device) -> None:
    """Said before the first launch, in the words of the op."""
    device.kernels = [], "device: expected compute capability 9.0 (sm90 kernel), got 8.0"
    (reason,) = NativePrefillBackend.validate_configuration(AMPERE, MLAPrefillSelectorConfig(torch.bfloat16, DEEPSEEK))
    assert reason == "build: device: expected compute capability 9.0 (sm90 kernel), got 8.0"


@pytest.mark.parametrize(
    ("forced", "dims", "suits"),
    [
        ("sm90", DEEPSEEK, True),
        ("sm90", EVEN, True),
        ("sm90", NO_ROPE, True),
        ("sm90", MLADimensions(qk_nope_head_dim=96, qk_rope_head_dim=32, v_head_dim=128), False),
        ("sm90", GLM, True),
        ("sm90", MINICPM, False),
        ("sm80", DEEPSEEK, True),
        ("sm80", GLM, True),
        ("sm80", ODD, False),
    ],
)
def test_dims_of_the_kernels_that_there_are(device, forced: str, dims: MLADimensions, suits: bool) -> None:
    device.kernels = [forced], ""
    reasons = NativePrefillBackend.validate_configuration(HOPPER, MLAPrefillSelectorConfig(torch.bfloat16, dims))
    assert not reasons if suits else reasons[0].startswith("dims (qk_nope, qk_rope, v): expected ")


def test_kernels_of_this_build_and_the_forced_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA_PREFILL_FORCE, as the ops read it."""
    binding = pytest.importorskip("mla_prefill._C")
    built = [name for name in ("sm90", "sm80") if name in binding.build_info()["backends"].split(",")]
    monkeypatch.delenv("MLA_PREFILL_FORCE", raising=False)
    names, reason = native._cuda_kernels(HOPPER)
    assert names == built and bool(reason) == (not built)
    for name in built:
        monkeypatch.setenv("MLA_PREFILL_FORCE", name)
        assert native._cuda_kernels(HOPPER) == ([name], "")
    monkeypatch.setenv("MLA_PREFILL_FORCE", "sm70")
    names, reason = native._cuda_kernels(HOPPER)
    assert names == [] and re.fullmatch(r"MLA_PREFILL_FORCE: expected .+, got sm70", reason)
    assert binding.cuda_kernels(7, 5)[0] == [] and "got 7.5" in binding.cuda_kernels(7, 5)[1]


def test_an_amd_gpu_is_no_hopper(device, monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx90a reports 9.0."""
    monkeypatch.setattr(torch.version, "hip", "7.2")
    device.capability = HOPPER
    assert get_mla_prefill_backend(config()).get_name() == "FLASH_ATTN"
    for name in ("NATIVE", "FLASHINFER", "TRTLLM_RAGGED"):
        reasons = MLAPrefillBackendEnum[name].get_class().validate_configuration(HOPPER, MLAPrefillSelectorConfig())
        assert any("got AMD 9.0" in reason for reason in reasons)


def test_the_parts_of_validation_are_asked() -> None:
    class Picky(Mine):
        @classmethod
        def supports_compute_capability(cls, device_capability):
            return False

        @classmethod
        def supports_dtype(cls, dtype):
            return False

        @classmethod
        def is_available(cls):
            return False

        @classmethod
        def supports_mla_dimensions(cls, mla_dimensions):
            return False

    reasons = Picky.validate_configuration(None, MLAPrefillSelectorConfig(torch.bfloat16, DEEPSEEK))
    assert len(reasons) == 4 and reasons[2] == "its dependencies are not available"


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_missing_library_is_named(name: str) -> None:
    """None is installed where the tests run; a GPU machine that has them skips."""
    backend_class = MLAPrefillBackendEnum[name].get_class()
    if backend_class.is_available():
        pytest.skip(f"{name}'s library is installed")
    assert re.fullmatch(r"package: expected flash.*, got none", backend_class.missing_dependency())
    with pytest.raises(ImportError, match=rf"{name}: package: expected flash.*, got none"):
        backend_class(8, 0.1, 512, 128, 64, 128, None)


# ---- selector --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dims", "dtype", "expected"),
    [
        (None, DEEPSEEK, torch.bfloat16, "NATIVE"),
        (None, GLM, torch.float32, "NATIVE"),
        (HOPPER, DEEPSEEK, torch.bfloat16, "NATIVE"),
        (HOPPER, EVEN, torch.bfloat16, "NATIVE"),
        (HOPPER, NO_ROPE, torch.bfloat16, "NATIVE"),
        (HOPPER, GLM, torch.bfloat16, "NATIVE"),
        (HOPPER, MINICPM, torch.bfloat16, "NATIVE"),
        (HOPPER, DEEPSEEK, torch.float32, "SDPA"),
        (AMPERE, DEEPSEEK, torch.bfloat16, "NATIVE"),
        (BLACKWELL, DEEPSEEK, torch.bfloat16, "FLASH_ATTN"),
        (BLACKWELL, GLM, torch.bfloat16, "TRTLLM_RAGGED"),
        ((12, 0), MINICPM, torch.bfloat16, "NATIVE"),
        ((7, 5), DEEPSEEK, torch.float16, "SDPA"),
    ],
)
def test_choice_by_priority(device, capability, dims, dtype, expected) -> None:
    device.capability = capability
    assert get_mla_prefill_backend(config(dims, dtype)).get_name() == expected


@pytest.mark.parametrize(("capability", "dims"), [(BLACKWELL, DEEPSEEK), (HOPPER, MINICPM)])
def test_without_libraries_the_portable_kernel_serves(device, capability, dims) -> None:
    device.capability, device.libraries = capability, False
    assert get_mla_prefill_backend(config(dims)).get_name() == "NATIVE"


def test_without_kernels_torch_remains(device, caplog: pytest.LogCaptureFixture) -> None:
    """Not in silence: it is much slower."""
    device.capability, device.libraries, device.cuda_build = BLACKWELL, False, False
    with caplog.at_level(logging.INFO, "mla_prefill"):
        assert get_mla_prefill_backend(config()) is SdpaPrefillBackend
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for name in ("NATIVE", *ADAPTERS):
        assert f"{name} (" in record.message


def test_the_choice_is_logged_once(device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mla_prefill"):
        for _ in range(3):
            get_mla_prefill_backend(config())
            get_mla_prefill_backend(config(chosen="SDPA"))
    assert [record.message for record in caplog.records] == [
        "MLA prefill backend: NATIVE, the first that suits",
        "MLA prefill backend: SDPA, as configured",
    ]


@pytest.mark.parametrize("chosen", ["SDPA", "sdpa", MLAPrefillBackendEnum.SDPA, SimpleNamespace(name="SDPA")])
def test_an_explicit_choice(device, chosen: object) -> None:
    assert get_mla_prefill_backend(config(chosen=chosen)) is SdpaPrefillBackend


def test_an_explicit_choice_is_refused_with_all_reasons(device) -> None:
    device.capability = (7, 0)
    with pytest.raises(
        ValueError,
        match=r"mla_prefill_backend: expected one that suits, got FLASHINFER: compute capability: .*; dtype: .*; dims",
    ):
        get_mla_prefill_backend(config(GLM, torch.float32, "FLASHINFER"))
    with pytest.raises(ValueError, match=r"expected one of NATIVE, .*, got 'FLASH'"):
        get_mla_prefill_backend(config(chosen="flash"))


def test_none_suits(device) -> None:
    with pytest.raises(ValueError, match=r"got none: NATIVE \(dtype: .*\); SDPA \(dtype: .*\)"):
        get_mla_prefill_backend(config(dtype=torch.float64))


def test_a_choice_does_not_outlive_an_override(device) -> None:
    assert get_mla_prefill_backend(config()) is NativePrefillBackend
    register_mla_prefill_backend(MLAPrefillBackendEnum.NATIVE, MINE)
    assert get_mla_prefill_backend(config()) is Mine
    MLAPrefillBackendEnum.NATIVE.clear_override()
    assert get_mla_prefill_backend(config()) is NativePrefillBackend


def test_a_choice_is_made_once_for_a_configuration(device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = NativePrefillBackend.validate_configuration.__func__
    counting = classmethod(lambda cls, *arguments: calls.append(arguments) or real(cls, *arguments))
    monkeypatch.setattr(NativePrefillBackend, "validate_configuration", counting)
    registry._changed()
    for _ in range(3):
        get_mla_prefill_backend(config())
    assert len(calls) == 1
    device.capability = AMPERE
    get_mla_prefill_backend(config())
    get_mla_prefill_backend(config(), mla_dimensions=GLM)
    assert len(calls) == 3


def test_the_layers_dims_count_more_than_the_models(device) -> None:
    device.capability = BLACKWELL
    assert get_mla_prefill_backend(config(DEEPSEEK), mla_dimensions=GLM).get_name() == "TRTLLM_RAGGED"


def test_what_a_configuration_may_leave_out() -> None:
    for sparse in (None, SimpleNamespace(), EngineConfig(), config(None, None)):
        assert selector.selector_config_of(sparse) == MLAPrefillSelectorConfig(None, None)


@pytest.mark.parametrize("named", ["cpu", torch.device("cpu")])
def test_the_device_of_a_configuration(named: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: HOPPER)
    monkeypatch.setattr(native, "_has_cuda_kernel", lambda: False)
    assert base.device_capability(named) is None and base.device_capability() == HOPPER
    on_cpu = EngineConfig(device_config=DeviceConfig(named), model_config=ModelConfig(torch.float32, GLM))
    assert get_mla_prefill_backend(on_cpu) is NativePrefillBackend


def test_layers_get_the_backend_that_is_configured() -> None:
    for chosen, expected in ((None, NativePrefillBackend), ("SDPA", SdpaPrefillBackend)):
        engine_config = EngineConfig(attention_config=AttentionConfig(chosen), device_config=DeviceConfig("cpu"))
        layer = mla_prefill.MLAAttention(
            num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
            kv_b_proj=torch.nn.Linear(32, 64), prefix="layer", vllm_config=engine_config,
        )  # fmt: skip
        assert type(layer.prefill_backend) is expected


def test_explanations_cover_every_backend(device) -> None:
    reasons = selector.explain_backends(None, MLAPrefillSelectorConfig(torch.bfloat16, DEEPSEEK))
    assert list(reasons) == list(MLAPrefillBackendEnum.__members__)
    assert reasons["NATIVE"] == reasons["SDPA"] == []
    assert "to be registered before it is used" in reasons["CUSTOM"][0]
