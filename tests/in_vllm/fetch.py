"""Puts the Python files of vLLM's wheel into a folder: all that the layer needs where the platform is the CPU.

    python tests/in_vllm/fetch.py 0.33.0 FOLDER

The wheel is fetched by pip into a temporary folder; its kernels, 300 MiB of extensions, are left behind.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def fetch(version: str, folder: Path) -> int:
    """The number of files written."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        subprocess.run([*command, f"vllm=={version}"], check=True)
        (wheel,) = Path(temporary).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(folder, names)
    return len(names)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(f"vllm {sys.argv[1]}: {fetch(sys.argv[1], Path(sys.argv[2]))} files in {sys.argv[2]}")
