"""What setup.py and MANIFEST.in make of the sources, and what they refuse."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
NOT_FOR_BUILDING = (".ci/", ".gitignore", ".pre-commit-config.yaml")

pytest.importorskip("pybind11", reason="pybind11 is not installed: the package can't be built here")


def run_setup(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a tree's setup.py, after all but the call of setup()."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("MLA_PREFILL_BACKENDS", "cpu")
    return runpy.run_path(str(root / "setup.py"))


def tracked_files() -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listing.split("\0") if name and (ROOT / name).exists()]


def copy_of_the_tree(folder: Path) -> list[str]:
    files = tracked_files()
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return files


def test_the_sdist_is_the_tree(tmp_path: Path) -> None:
    """A header that it lacks would show only where a wheel is built from it."""
    tree = tmp_path / "tree"
    files = copy_of_the_tree(tree)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("mla_prefill-*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    expected = {name for name in files if not name.startswith(NOT_FOR_BUILDING)}
    assert expected - inside == set()
    assert not [name for name in inside if name.endswith((".so", ".pyc", ".o"))]


@pytest.mark.parametrize("missing", ["csrc/plan", "csrc/ops", "csrc/context"])
def test_a_tree_without_some_sources_is_refused(tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_of_the_tree(tmp_path)
    shutil.rmtree(tmp_path / missing)
    with pytest.raises(SystemExit, match=rf"{missing}/\*\.cpp: expected source files, got none"):
        run_setup(tmp_path, monkeypatch)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("option", ["", "-static-libstdc++"])
def test_a_library_with_a_cpp_runtime_of_its_own_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal of its ops would end the process: an exception can't cross from one runtime into another."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {option}\n')
    compiler.chmod(0o755)
    for variable in ("CC", "CXX"):
        monkeypatch.setenv(variable, str(compiler))
    source = tmp_path / "probe.cpp"
    source.write_text('#include <stdexcept>\nextern "C" void probe() { throw std::runtime_error("refused"); }\n')
    names = run_setup(ROOT, monkeypatch)
    extension = names["op_extension"]("probe", [str(source)], extra_compile_args=["-std=c++17"])
    command = names["BuildExtension"](setuptools.Distribution({"name": "probe", "ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    command.ensure_finalized()
    if option:
        with pytest.raises(SystemExit, match=rf"CC, CXX: expected a toolchain .* shared libstdc\+\+.*, got {compiler}"):
            command.run()
    else:
        command.run()
    assert len(list(tmp_path.glob("lib/probe*.so"))) == (0 if option else 1)
