"""What importing and linking the package drags in."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_prefill
from mla_prefill.backends import native

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(mla_prefill.__file__).resolve().parent


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def op_library() -> Path:
    (library,) = PACKAGE.glob("_ops*.so")
    return library


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", mla_prefill.__version__)
    assert mla_prefill.__version__ == importlib.metadata.version("mla-prefill")


def test_public_names() -> None:
    for name in mla_prefill.__all__:
        assert hasattr(mla_prefill, name)
    for name in ("ragged_prefill", "plan_prefill", "merge_states", "gather_latent", "reference"):
        assert name in mla_prefill.__all__
    for name in ("ragged_prefill", "plan_prefill", "merge_states", "gather_latent"):
        doc = getattr(mla_prefill, name).__doc__
        assert "Args:" in doc and "Raises:" in doc


def test_A30_import_needs_no_accelerator_and_no_peer() -> None:
    """No CUDA context, and none of the optional packages, installed or not."""
    optional = "triton vllm flash_attn flashinfer typer rich matplotlib cudnn"
    code = f"""
import sys
import torch
before = set(sys.modules)
import mla_prefill
assert not torch.cuda.is_initialized()
print(*sorted((set(sys.modules) - before) & set({optional.split()!r})))
"""
    assert python(code) == ""


def test_works_without_the_binding_module() -> None:
    """_C belongs to one Python version, the ops to none: another interpreter has all of the API but the tools."""
    code = """
import sys
sys.modules["mla_prefill._C"] = None
import torch
import mla_prefill
q = torch.ones(2, 1, 192)
bounds = torch.tensor([0, 2], dtype=torch.int32)
plan = mla_prefill.plan_prefill(bounds, bounds, num_heads=1, causal=True)
print(mla_prefill.ragged_prefill(q, q, q[..., :128], bounds, bounds, scale=0.1, causal=True, plan=plan).sum().item())
"""
    assert float(python(code)) == 256.0


def test_binding_module_describes_the_build() -> None:
    binding = pytest.importorskip("mla_prefill._C")
    info = binding.build_info()
    assert info["version"] == mla_prefill.__version__ and "cpu" in info["backends"]
    table = binding.kernel_table()
    assert any(row["backend"] == "cpu" and row["usable"] for row in table)
    common = {"backend", "dtypes", "head_dims", "detail"}
    for row in table:
        if row["backend"] == "cpu":
            assert set(row) == common | {"usable", "reason"}
            assert isinstance(row["usable"], bool) and (row["usable"] or row["reason"])
        else:  # whether its device is there is not for the binding module to say
            device = "gcn_architectures" if row["backend"] == "hip" else "compute_capability"
            assert set(row) == common | {device}
            assert row["backend"] in info["backends"].split(",")
        if row["backend"] == "sm90":
            assert row["head_dims"] == native._GPU_KERNELS["sm90"].dimensions, "what the selector believes"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
@pytest.mark.parametrize("library", sorted(PACKAGE.glob("_*ops*.so")), ids=lambda path: path.name)
def test_op_libraries_miss_none_of_our_own_symbols(library: Path) -> None:
    """Linking a shared library does not say so, and where torch has no CUDA the CUDA library is never loaded."""
    undefined = subprocess.run(
        ["nm", "-DC", "--undefined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    assert "torch" in undefined
    assert not [line for line in undefined.splitlines() if "mla_prefill" in line]


# ---- libraries that can't be loaded ----------------------------------------------------------------------------------


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "mla_prefill", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "mla_prefill"


def import_error(package: Path, before: str = "") -> str:
    """What importing the copy says, in a process that lives to say it."""
    code = f"""
import sys
sys.path.insert(0, {str(package.parent)!r})
{before}
try:
    import mla_prefill
except ImportError as error:
    print(error)
"""
    return python(code)


def test_a_library_that_is_missing_is_a_readable_error(copied_package: Path) -> None:
    """AX12: not an undefined symbol."""
    for library in copied_package.glob("*.so"):
        library.unlink()
    message = import_error(copied_package)
    assert re.match(r"mla_prefill: expected one op library _ops\*\.so in .*, got \[\]", message)


@pytest.mark.parametrize(
    ("share", "reason"),
    [(0, "file too short"), (0.003, "ends before"), (0.3, "ends before"), (0.8, "ends before")],
)
@pytest.mark.parametrize("stem", ["_ops", "_C"])
def test_a_library_that_is_cut_off_is_a_readable_error(
    copied_package: Path, stem: str, share: float, reason: str
) -> None:
    """The loader maps what is not there, and the process would die of SIGBUS."""
    library = next(iter(copied_package.glob(f"{stem}*.so")), None)
    if library is None or (stem == "_C" and share == 0):
        pytest.skip("no such library, or one that Python itself refuses")
    content = library.read_bytes()
    library.write_bytes(content[: int(share * len(content))])
    message = import_error(copied_package)
    assert re.match(
        rf"mla_prefill: expected {library.name} to load under torch {re.escape(torch.__version__)}, "
        rf"got: .*{reason}.*; install the package again$",
        message,
    ), message
    assert ">= 2.11" not in message


def test_a_file_that_is_no_library_is_a_readable_error(copied_package: Path) -> None:
    (library,) = copied_package.glob("_ops*.so")
    library.write_bytes(b"<html>404</html>" * 100)
    message = import_error(copied_package)
    assert message.endswith("invalid ELF header; install the package again"), message


@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed")
def test_a_library_for_another_torch_is_a_readable_error(copied_package: Path, tmp_path: Path) -> None:
    (library,) = copied_package.glob("_ops*.so")
    source = tmp_path / "probe.c"
    source.write_text("void of_no_torch(void);\nvoid (*probe)(void) = of_no_torch;\n")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    message = import_error(copied_package)
    assert re.search(r"got: .*undefined symbol: of_no_torch; .*: build the package on this machine$", message), message


def test_an_older_torch_is_a_readable_error(copied_package: Path) -> None:
    before = 'import torch\ntorch.__version__ = torch.torch_version.TorchVersion("2.10.1+cpu")'
    assert import_error(copied_package, before) == "mla_prefill: expected torch >= 2.11, got torch 2.10.1+cpu"
    for known in ("2.11.0a0+git123", "2.11.0", "2.15.0+cu132", "3.0.0"):
        assert import_error(copied_package, before.replace("2.10.1+cpu", known)) == ""


# ---- the op library --------------------------------------------------------------------------------------------------


def test_AX12_op_library_holds_no_python(op_library: Path) -> None:
    """Names of needed libraries and of undefined symbols are plain text in the file."""
    content = op_library.read_bytes()
    for name in (b"libpython", b"libtorch_python", b"PyObject", b"Py_Initialize", b"pybind11"):
        assert name not in content, name
    assert "abi3" in op_library.name or "cpython" not in op_library.name


def test_AX12_op_library_uses_the_stable_abi_only(op_library: Path) -> None:
    """Undefined symbols of at:: or c10:: would tie it to one torch; the stable ABI is C."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("needs nm")
    symbols = subprocess.run(
        [nm, "-D", "--undefined-only", op_library], capture_output=True, text=True, check=True
    ).stdout
    assert "aoti_torch" in symbols or "torch_library" in symbols
    unstable = re.findall(r"\b_ZN?K?(?:2at|3c10|5torch)\S*", symbols)
    assert not unstable, unstable


def test_op_library_names_no_build_machine(op_library: Path) -> None:
    content = op_library.read_bytes()
    assert str(ROOT).encode() not in content and str(Path.home()).encode() + b"/" not in content


# ---- the source tree -------------------------------------------------------------------------------------------------


def test_only_the_ops_folder_includes_torch() -> None:
    pattern = re.compile(r'#\s*include\s*[<"](?:torch|ATen|c10|caffe2)/')
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".hip"}]
    assert sources
    offenders = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.relative_to(ROOT).parts[1] != "ops" and pattern.search(path.read_text())
    ]
    assert offenders == []


def test_all_schemas_are_in_one_file() -> None:
    defining = [
        path.name for path in (ROOT / "csrc").rglob("*.cpp") if re.search(r"\bm\.def\(\s*\"\w+\(", path.read_text())
    ]
    assert defining == ["schema.cpp"]
