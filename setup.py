"""Builds the op library (torch's stable ABI, no Python in it) and the small pybind11 module `_C`.

    pip install --no-build-isolation .

MLA_PREFILL_BACKENDS=cpu,sm90,sm80 chooses what is compiled; the default is every backend whose toolchain is there. The
CUDA kernels need nvcc, not a CUDA build of torch. They go into a library of their own, loaded only where torch has
CUDA. sm90 is for Hopper alone; sm80 is compiled for MLA_PREFILL_CUDA_ARCHS=80,86,89,90, the last one as PTX for later
devices too. The HIP kernels need a ROCm build of torch, whose hipcc is then used; they too have their own library.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pybind11
import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
BACKENDS = ("cpu", "sm90", "sm80", "hip")
CUDA_BACKENDS = ("sm90", "sm80")
HIP_ARCHITECTURES = "gfx90a;gfx942;gfx950"


def find_cuda() -> Path | None:
    """The folder of the CUDA toolkit, also where torch has no CUDA and so looks for none."""
    nvcc = shutil.which("nvcc")
    candidates = [
        os.environ.get("CUDA_HOME"),
        cpp_extension.CUDA_HOME,
        nvcc and Path(nvcc).parents[1],
        "/usr/local/cuda",
    ]
    for home in (Path(candidate) for candidate in candidates if candidate):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime_api.h").exists():
            return home
    return None


def chosen_backends(cuda: Path | None, rocm: Path | None) -> list[str]:
    toolchains = {"cpu": True, **dict.fromkeys(CUDA_BACKENDS, cuda and not rocm), "hip": rocm}
    available = [name for name in BACKENDS if toolchains[name]]
    names = os.environ.get("MLA_PREFILL_BACKENDS", ",".join(available)).split(",")
    if unknown := [name for name in names if name not in BACKENDS]:
        raise SystemExit(f"MLA_PREFILL_BACKENDS: expected names of {', '.join(BACKENDS)}, got {', '.join(unknown)}")
    for name in CUDA_BACKENDS:
        if name in names and name not in available:
            raise SystemExit(f"MLA_PREFILL_BACKENDS: expected nvcc (or $CUDA_HOME) for {name}, got none")
    if "hip" in names and "hip" not in available:
        raise SystemExit(f"MLA_PREFILL_BACKENDS: expected a ROCm build of torch for hip, got torch {torch.__version__}")
    return ["cpu", *(name for name in names if name != "cpu")]


def cuda_architectures() -> list[str]:
    """Of the portable kernels, ascending: 80 is compute capability 8.0."""
    names = os.environ.get("MLA_PREFILL_CUDA_ARCHS", "80,86,89,90").split(",")
    if wrong := [name for name in names if not re.fullmatch(r"[1-9]\d+", name) or int(name) < 80]:
        raise SystemExit(f"MLA_PREFILL_CUDA_ARCHS: expected numbers from 80 on, as 80,86,90, got {', '.join(wrong)}")
    return sorted(names, key=int)


def version() -> str:
    for line in (ROOT / "python/mla_prefill/__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise SystemExit('python/mla_prefill/__init__.py: expected a line __version__ = "..."')


def sources(*patterns: str) -> list[str]:
    found = {pattern: sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)) for pattern in patterns}
    if missing := [pattern for pattern, paths in found.items() if not paths]:
        raise SystemExit(
            f"{', '.join(missing)}: expected source files, got none: this copy of the sources is not whole"
        )
    return sorted(path for paths in found.values() for path in paths)


def expect_shared_runtime(library: Path, linker: list[str]) -> None:
    """Refuses an op library with a C++ runtime of its own.

    Its refusals are C++ exceptions that torch catches: with a second runtime in the process each would end it. The
    names of the libraries that a library needs are plain text in it.
    """
    if not re.search(rb"\0lib(std)?c\+\+\.so\.", library.read_bytes()):
        library.unlink()
        raise SystemExit(
            "CC, CXX: expected a toolchain that links the shared libstdc++, which torch and the ops must have in "
            f"common, got {' '.join(linker)}, which put a copy of its own into {library.name}"
        )


cuda = find_cuda()
rocm = Path(cpp_extension.ROCM_HOME) if torch.version.hip and cpp_extension.ROCM_HOME else None
backends = chosen_backends(cuda, rocm)
architectures = cuda_architectures()
torch_root = Path(torch.__file__).parent
compile_args = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    # No path of the build machine in messages.
    f"-ffile-prefix-map={ROOT.resolve()}=.",
    f"-ffile-prefix-map={torch_root}=torch",
]
for path in cpp_extension.include_paths():
    compile_args += ["-isystem", path]  # no warnings of torch's headers


def op_extension(name: str, source_files: list[str], **options: Any) -> Extension:
    """A library of ops without Python in it."""
    return Extension(
        name,
        source_files,
        include_dirs=[str(ROOT / "csrc"), *options.pop("include_dirs", [])],
        # TORCH_TARGET_VERSION keeps the code to what torch 2.11 has, so that one build runs on 2.11 and later.
        define_macros=[
            ("TORCH_TARGET_VERSION", "0x020b000000000000"),
            ("TORCH_STABLE_ONLY", None),
            *options.pop("define_macros", []),
        ],
        library_dirs=[str(torch_root / "lib"), *options.pop("library_dirs", [])],
        # libtorch.so alone: it brings the CPU or the CUDA libraries of whatever torch is there at run time.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", *options.pop("extra_link_args", [])],
        py_limited_api=True,
        **options,
    )


op_library = op_extension(
    "mla_prefill._ops",
    [
        path
        for path in sources("csrc/ops/*.cpp", "csrc/plan/*.cpp", "csrc/context/*.cpp", "csrc/cpu/*.cpp")
        if path != "csrc/ops/gpu.cpp"
    ],
    extra_compile_args=compile_args,
)
built_for = [
    ("MLA_PREFILL_BACKENDS", f'"{",".join(backends)}"'),
    ("MLA_PREFILL_CUDA_ARCHS", f'"{",".join(architectures)}"'),
]
bindings = Extension(
    "mla_prefill._C",
    ["csrc/bindings.cpp", "csrc/plan/host.cpp", "csrc/cpu/isa.cpp", "csrc/sm80/arguments.cpp"],
    include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
    define_macros=[
        ("MLA_PREFILL_VERSION", f'"{version()}"'),
        ("MLA_PREFILL_TORCH", f'"{torch.__version__}"'),
        *built_for,
    ],
    extra_compile_args=compile_args,
)

extensions = [op_library, bindings]
gpu_sources = [
    *(f"csrc/ops/{name}.cpp" for name in ("arguments", "context", "gpu", "prefill")),
    *sources("csrc/context/*.cu", "csrc/plan/*.cu"),
]
if cuda_backends := [name for name in CUDA_BACKENDS if name in backends]:
    cpp_extension.CUDA_HOME = str(cuda)  # None with a CPU build of torch

    def nvcc_args(*targets: str) -> list[str]:
        return [
            "-std=c++17",
            "-O3",
            *(f"-gencode=arch={target}" for target in targets),
            "-Xptxas=--warn-on-spills,--warning-as-error",
            "-Xcompiler=-fvisibility=hidden",
        ]

    portable = [f"compute_{arch},code=sm_{arch}" for arch in architectures]
    portable.append(f"compute_{architectures[-1]},code=compute_{architectures[-1]}")
    cuda_library = op_extension(
        "mla_prefill._cuda_ops",
        [*gpu_sources, *(sources("csrc/sm80/*.cpp", "csrc/sm80/*.cu") if "sm80" in backends else [])],
        define_macros=[*built_for, *((f"MLA_PREFILL_WITH_{name.upper()}", None) for name in cuda_backends)],
        include_dirs=[str(cuda / "include")],
        library_dirs=[str(cuda / "lib64"), str(cuda / "lib")],
        extra_compile_args={"cxx": compile_args, "nvcc": nvcc_args(*portable)},
        extra_link_args=["-lcudart_static", "-ldl", "-lrt", "-lpthread"],
    )
    if "sm90" in backends:
        hopper_args = {"cxx": compile_args, "nvcc": nvcc_args("compute_90a,code=sm_90a")}
        cuda_library.compiled_apart = [(sources("csrc/sm90/*.cpp", "csrc/sm90/*.cu"), hopper_args)]
    extensions.append(cuda_library)
if "hip" in backends:
    os.environ.setdefault("PYTORCH_ROCM_ARCH", HIP_ARCHITECTURES)  # also where no GPU is there to be asked
    extensions.append(
        op_extension(
            "mla_prefill._hip_ops",
            [
                *gpu_sources,
                *sources("csrc/hip/*.cpp", "csrc/hip/*.hip"),
            ],
            include_dirs=[str(rocm / "include")],
            extra_compile_args={"cxx": compile_args, "nvcc": ["-std=c++17", "-O3", "-fvisibility=hidden"]},  # hipcc's
            # torch's own libamdhip64, which libtorch brings: a second one in the process would not know its streams.
            library_dirs=[str(rocm / "lib")],
            extra_link_args=["-lamdhip64"],
        )
    )


class BuildExtension(cpp_extension.BuildExtension):
    """An extension may have ``compiled_apart``: (sources, compile arguments) for other architectures than the rest."""

    def run(self) -> None:
        if torch.version.cuda is None:
            self.remove_stale_objects()
        super().run()

    def remove_stale_objects(self) -> None:
        """torch tracks what CUDA sources include only where it was built with CUDA itself, HIP sources' never."""
        newest = max(Path(ROOT, header).stat().st_mtime for header in sources("csrc/**/*.h", "csrc/**/*.cuh"))
        for source in sources("csrc/**/*.cu", "csrc/**/*.hip"):
            built = Path(self.build_temp, source).with_suffix(".o")
            if built.exists() and built.stat().st_mtime < newest:
                built.unlink()

    def build_extension(self, extension: Extension) -> None:
        for group, arguments in getattr(extension, "compiled_apart", []):
            extension.extra_objects += self.compiler.compile(
                group,
                output_dir=self.build_temp,
                macros=extension.define_macros,
                include_dirs=extension.include_dirs,
                extra_postargs=arguments,
                depends=extension.depends,
            )
        super().build_extension(extension)
        if extension.py_limited_api:
            expect_shared_runtime(Path(self.get_ext_fullpath(extension.name)), self.compiler.linker_so)


print(f"mla_prefill {version()}: backends {', '.join(backends)}; torch {torch.__version__}")
setup(
    ext_modules=extensions,
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=False)},
)
