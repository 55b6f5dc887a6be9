"""The op library for AMD GPUs as a whole, as far as it can be built without ROCm: every source is compiled against the
headers of HIP and of torch, linked with HIP's runtime, loaded, and found by the dispatcher. Nothing is launched: the
place of the device code, which the other tests compile, is taken by one code object."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from kernels import CLANG, ROOT, compile_kernels
from torch.utils import cpp_extension

HIP_HEADER = Path("/usr/include/hip/hip_runtime.h")
pytestmark = [
    pytest.mark.usefixtures("toolchain"),
    pytest.mark.skipif(not HIP_HEADER.exists(), reason=f"needs {HIP_HEADER} (apt: libamdhip64-dev)"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

DEFINES = ("-D__HIP_PLATFORM_AMD__=1", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY")
# A CPU build of torch has no such function; the library must not need any other.
STAND_IN = 'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n'


def run(*command: object) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stderr}"
    return result.stdout


def sources_of_the_library(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What setup.py would compile on a ROCm build of torch."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(cpp_extension, "ROCM_HOME", "/opt/rocm")
    monkeypatch.setenv("MLA_PREFILL_BACKENDS", "cpu,hip")
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx942")
    runpy.run_path(str(ROOT / "setup.py"))
    (library,) = (extension for extension in given["ext_modules"] if extension.name == "mla_prefill._hip_ops")
    return [ROOT / source for source in library.sources]


def build(sources: list[Path], folder: Path) -> Path:
    common = ("-std=c++17", "-fPIC", "-fvisibility=hidden", *DEFINES, "-I", ROOT / "csrc")
    torch_headers = [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    kernels = compile_kernels("prefill_bf16", "gfx942", folder / "kernels.co")
    objects = []
    for source in sources:
        objects.append(folder / f"{source.parent.name}_{source.name}.o")
        if source.suffix == ".cpp":
            run("g++", *common, *torch_headers, "-c", source, "-o", objects[-1])
            continue
        run(
            *(CLANG, "-x", "hip", "--cuda-host-only", "--offload-arch=gfx942", "-nogpuinc", *common),
            *("-Xclang", "-fcuda-include-gpubinary", "-Xclang", kernels),
            *("-D__AMDGCN_WAVEFRONT_SIZE=64", "-I", run(CLANG, "-print-resource-dir").strip()),  # for older headers
            *("-c", source, "-o", objects[-1]),
        )
    library = folder / "_hip_ops.so"
    torch_library = Path(torch.__file__).parent / "lib"
    run("g++", "-shared", "-o", library, *objects, "-L", torch_library, "-Wl,--no-as-needed", "-ltorch", "-lamdhip64")
    return library


def test_library_links_loads_and_registers_its_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as rocm:
        sources = sources_of_the_library(rocm)
    assert {source.name for source in sources} >= {"prefill_bf16.hip", "prefill_fp16.hip", "device.cu", "gpu.cpp"}
    library = build(sources, tmp_path)
    if nm := shutil.which("nm"):
        undefined = run(nm, "-DC", "--undefined-only", library).splitlines()
        assert not [line for line in undefined if "mla_prefill" in line]
        assert not [line for line in undefined if "hip" in line and "@hip_" not in line]
    (tmp_path / "stand_in.cpp").write_text(STAND_IN)
    run("g++", "-shared", "-fPIC", tmp_path / "stand_in.cpp", "-o", tmp_path / "stand_in.so")
    code = f"""
import ctypes, sys
ctypes.CDLL({str(tmp_path / "stand_in.so")!r}, ctypes.RTLD_GLOBAL)
import torch, mla_prefill
torch.ops.load_library({str(library)!r})
for op in ("ragged_prefill", "plan_prefill", "merge_states", "gather_latent"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"mla_prefill::{{op}}", "CUDA"), op
"""
    run(sys.executable, "-c", code)
