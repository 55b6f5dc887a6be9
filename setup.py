"""Builds the op library (torch's stable ABI, no Python in it) and the small pybind11 module `_C`.

    pip install --no-build-isolation .

MLA_PREFILL_BACKENDS=cpu chooses what is compiled; the default is every backend whose toolchain is there.
"""

import os
from pathlib import Path

import pybind11
import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
BACKENDS = ("cpu",)


def chosen_backends() -> list[str]:
    names = os.environ.get("MLA_PREFILL_BACKENDS", ",".join(BACKENDS)).split(",")
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise SystemExit(f"MLA_PREFILL_BACKENDS: expected names of {', '.join(BACKENDS)}, got {', '.join(unknown)}")
    return names


def version() -> str:
    for line in (ROOT / "python/mla_prefill/__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise SystemExit('python/mla_prefill/__init__.py: expected a line __version__ = "..."')


def sources(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


backends = chosen_backends()
compile_args = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    f"-ffile-prefix-map={ROOT.resolve()}=.",  # no path of the build machine in messages
]
torch_root = Path(torch.__file__).parent

op_library = Extension(
    "mla_prefill._ops",
    sources("csrc/ops/*.cpp", "csrc/plan/*.cpp", "csrc/context/*.cpp", "csrc/cpu/*.cpp"),
    include_dirs=[str(ROOT / "csrc"), *cpp_extension.include_paths()],
    # TORCH_TARGET_VERSION keeps the code to what torch 2.11 has, so that one build runs on 2.11 and later.
    define_macros=[("TORCH_TARGET_VERSION", "0x020b000000000000"), ("TORCH_STABLE_ONLY", None)],
    library_dirs=[str(torch_root / "lib")],
    extra_compile_args=compile_args,
    # libtorch.so alone: it brings the CPU or the CUDA libraries of whatever torch is there at run time.
    extra_link_args=["-Wl,--no-as-needed", "-ltorch"],
    py_limited_api=True,
)
bindings = Extension(
    "mla_prefill._C",
    ["csrc/bindings.cpp", "csrc/plan/host.cpp", "csrc/cpu/isa.cpp"],
    include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
    define_macros=[
        ("MLA_PREFILL_VERSION", f'"{version()}"'),
        ("MLA_PREFILL_BACKENDS", f'"{",".join(backends)}"'),
        ("MLA_PREFILL_TORCH", f'"{torch.__version__}"'),
    ],
    extra_compile_args=compile_args,
)

print(f"mla_prefill {version()}: backends {', '.join(backends)}; torch {torch.__version__}")
setup(
    ext_modules=[op_library, bindings],
    cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(no_python_abi_suffix=False)},
)
