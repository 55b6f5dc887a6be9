"""Compiles the HIP kernels without ROCm, and runs them on torch tensors in the emulator.

The sources are those that hipcc compiles; ``stand_in/hip/hip_runtime.h`` replaces ROCm's header.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from gfx9 import CodeObject, Emulator
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
SOURCES = {
    "prefill_bf16": "csrc/hip/prefill_bf16.hip",
    "prefill_fp16": "csrc/hip/prefill_fp16.hip",
    "plan": "csrc/plan/device.cu",
    "gather": "csrc/context/gather.cu",
    "merge": "csrc/context/merge.cu",
}
CLANG, OBJDUMP, READELF = "clang++-22", "llvm-objdump-22", "llvm-readelf-22"
FLAGS = (
    *("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    *("-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-D__HIP_PLATFORM_AMD__"),
)

WorkItem = tuple[int, int, int, int, int, int, int, int]


def missing_tools() -> list[str]:
    return [tool for tool in (CLANG, OBJDUMP, READELF) if shutil.which(tool) is None]


def compile_kernels(kernel: str, arch: str, to: Path, csrc: Path = ROOT / "csrc") -> Path:
    """A code object of one source file. ``csrc`` may be a changed copy of the repository's folder."""
    source = csrc.parent / SOURCES[kernel] if csrc.name == "csrc" else csrc / SOURCES[kernel].removeprefix("csrc/")
    include = ("-I", str(csrc), "-I", str(Path(__file__).parent / "stand_in"))
    command = [CLANG, f"--offload-arch={arch}", *FLAGS, *include, "-c", str(source), "-o", str(to)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{kernel} for {arch} does not compile:\n{result.stderr}")
    return to


@functools.cache
def code_object(kernel: str, arch: str) -> CodeObject:
    with TemporaryDirectory() as folder:
        return CodeObject(compile_kernels(kernel, arch, Path(folder) / "kernels.co"), OBJDUMP)


# ---- csrc/params.h and csrc/plan, as the kernels take them -----------------------------------------------------------


class Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class Descale(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64), ("head_stride", ctypes.c_int64))


class PrefillParams(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("q", "k", "k_pe", "v", "out")),
        ("lse", Rows),  # data, head_stride, row_stride
        *((name, ctypes.c_uint64) for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *((name, ctypes.c_int32) for name in ("batch", "num_heads")),
        *((name, ctypes.c_int64) for name in ("total_q", "total_k")),
        *((name, ctypes.c_int32) for name in ("dim_qk", "dim_k", "dim_v")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_bool) for name in ("causal", "accumulate")),
        *((name, ctypes.c_int8) for name in ("dtype", "out_dtype")),
        *((name, Descale) for name in ("q_descale", "k_descale", "v_descale")),
        ("scratch", ctypes.c_uint64),
    )


class PrefillArguments(ctypes.Structure):
    _fields_ = (("problem", PrefillParams), ("plan", ctypes.c_uint64), ("num_blocks", ctypes.c_int32))


class MergeParams(ctypes.Structure):
    _fields_ = (
        *((name, Rows) for name in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_heads", "dim_v")),
        ("dtype", ctypes.c_int8),
    )


class GatherParams(ctypes.Structure):
    _fields_ = (
        ("cache", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("block_stride", "slot_stride", "num_blocks")),
        ("block_size", ctypes.c_int32),
        ("block_table", ctypes.c_uint64),
        ("block_table_stride", ctypes.c_int64),
        ("max_blocks", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("cu_seqlens", "starts")),
        ("batch", ctypes.c_int32),
        ("out", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("out_rows", "out_stride")),
        ("dim", ctypes.c_int32),
        *((name, ctypes.c_int8) for name in ("layout", "out_dtype")),
        ("k_scale", ctypes.c_uint64),
    )


class PlanConfig(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("tile_q", "short_tile_q", "short_keys", "tile_kv", "item_overhead", "min_item_cost")
        ),
        ("group_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("max_splits", "split_items", "min_split_keys")),
    )


class PlanProblem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *((name, ctypes.c_int32) for name in ("batch", "num_heads")),
        ("causal", ctypes.c_bool),
        ("bytes_per_key", ctypes.c_int64),
    )


class PlanArguments(ctypes.Structure):
    _fields_ = (
        ("config", PlanConfig),
        ("problem", PlanProblem),
        ("buffer", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("capacity", "num_ctas", "num_chunks", "chunk_size")),
        ("scratch", ctypes.c_uint64),
    )


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MANGLED = {torch.float32: "f", torch.bfloat16: "NS_8BFloat16E", torch.float16: "NS_7Float16E"}  # in kernels' names
LAYOUTS = {"plain": 0, "fp8_e4m3": 1, "fp8_ds_mla": 2}
PLAN_VERSION, ITEMS_BEGIN = 2, 2072
PLAN_CONFIGS = {  # plan_config() of csrc/*/config.h
    "hip": PlanConfig(128, 64, -1, 32, 8, 32, 32 << 20, 1),
    "sm90": PlanConfig(128, 64, 128, 128, 2, 8, 32 << 20, 16, 132, 4096),  # with short sequences, and split ones
}


# ---- Tensors ---------------------------------------------------------------------------------------------------------


class Device:
    """An emulator with the memory of torch tensors in it: whole storages, so that strides and neighbours are there."""

    def __init__(self, code: CodeObject, wave_order: int = 0) -> None:
        self.emulator = Emulator(code, wave_order=wave_order)
        self._addresses: dict[int, int] = {}

    @staticmethod
    def _storage(tensor: Tensor) -> np.ndarray:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()

    def address(self, tensor: Tensor | None) -> int:
        """Uploads the tensor's storage, once; 0 for None."""
        if tensor is None:
            return 0
        host = tensor.untyped_storage().data_ptr()
        if host not in self._addresses:
            self._addresses[host] = self.emulator.memory.upload(self._storage(tensor))
        return self._addresses[host] + tensor.storage_offset() * tensor.itemsize

    def rows(self, tensor: Tensor | None) -> Rows:
        """The struct of a tensor with two strides before a dense last dimension, or of an lse (its own two)."""
        return Rows() if tensor is None else Rows(self.address(tensor), tensor.stride(0), tensor.stride(1))

    def read_back(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = self._storage(tensor)
            address = self._addresses[tensor.untyped_storage().data_ptr()]
            storage[...] = self.emulator.memory.download(address, storage.dtype, storage.shape)

    def launch(self, kernel: str, num_blocks: int, threads: int, arguments: ctypes.Structure) -> None:
        (name,) = (name for name in self.emulator.code.kernel_names() if re.search(kernel, name))
        self.emulator.launch(name, num_blocks, threads, bytes(arguments))


def plan_tensor(items: Sequence[WorkItem]) -> Tensor:
    """A plan as the kernels read it: the number of items, and the items."""
    header = [0] * ITEMS_BEGIN
    header[1] = len(items)
    return torch.tensor([*header, *(value for item in items for value in item)], dtype=torch.int32)


def ragged_prefill(
    code: CodeObject,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    k_pe: Tensor | None,
    plan: Tensor,
    out: Tensor,
    lse: Tensor | None,
    accumulate: bool = False,
    num_blocks: int = 2,
    wave_order: int = 0,
    first_row: int = 0,
) -> Emulator:
    """One call of the prefill kernel. Like ``hip::normalised``, it passes the last columns of a joined k as k_pe.

    With ``first_row`` the kernel is told of larger tensors, of which these are the rows from there on.
    """
    device = Device(code, wave_order)

    def rows(tensor: Tensor | None, row_dim: int = 0) -> Rows:
        described = device.rows(tensor)
        if tensor is not None:
            described.data -= first_row * tensor.stride(row_dim) * tensor.itemsize
        return described

    shared = k[..., 128:] if k_pe is None else (k_pe.unsqueeze(1) if k_pe.dim() == 2 else k_pe)
    k_pe_rows = rows(shared)
    k_pe_rows.head_stride = shared.stride(1) if shared.shape[1] > 1 else 0
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q + first_row, cu_seqlens_k + first_row
    params = PrefillParams(
        q=rows(q),
        k=rows(k),
        k_pe=k_pe_rows,
        v=rows(v),
        out=rows(out),
        lse=rows(lse, 1),
        cu_seqlens_q=device.address(cu_seqlens_q),
        cu_seqlens_k=device.address(cu_seqlens_k),
        batch=cu_seqlens_q.numel() - 1,
        num_heads=q.shape[1],
        total_q=q.shape[0],
        total_k=k.shape[0],
        dim_qk=q.shape[2],
        dim_k=k.shape[2],
        dim_v=v.shape[2],
        scale=scale,
        causal=causal,
        accumulate=accumulate,
        dtype=DTYPES[q.dtype],
        out_dtype=DTYPES[out.dtype],
    )
    device.launch("prefill_kernel", num_blocks, 256, PrefillArguments(params, device.address(plan), num_blocks))
    device.read_back(*(tensor for tensor in (out, lse, plan) if tensor is not None))
    return device.emulator


def plan_prefill(
    code: CodeObject,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    num_heads: int,
    causal: bool,
    capacity: int,
    backend: str = "hip",
    chunk_size: int | None = None,
) -> Tensor:
    """The device planner's buffer, for bf16 or fp16 and head dims (128, 64, 128). Large batches are sorted in chunks,
    by three launches."""
    device = Device(code)
    batch = cu_seqlens_q.numel() - 1
    num_ctas, num_chunks = 3, 1 if chunk_size is None else -(-batch // chunk_size)
    buffer = torch.full((ITEMS_BEGIN + 8 * capacity,), -1, dtype=torch.int32)
    scratch = torch.full((2 + 2 * 160 * num_chunks + 15 * batch,), -1, dtype=torch.int32)
    problem = PlanProblem(
        device.address(cu_seqlens_q), device.address(cu_seqlens_k), batch, num_heads, causal, (128 + 64 + 128) * 2
    )
    arguments = PlanArguments(
        PLAN_CONFIGS[backend],
        problem,
        device.address(buffer),
        capacity,
        num_ctas,
        num_chunks,
        batch if chunk_size is None else chunk_size,
        device.address(scratch),
    )
    if chunk_size is None:
        device.launch("plan_kernel", num_ctas, 256, arguments)
    else:
        for kernel, num_blocks in (("count", num_chunks), ("place", num_chunks), ("write", num_ctas)):
            device.launch(f"{kernel}_kernel", num_blocks, 256, arguments)
    device.read_back(buffer)
    return buffer


def merge_states(
    code: CodeObject, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor, *, pack: int
) -> None:
    """``pack`` chooses the variant: elements that a lane moves at once."""
    device = Device(code)
    tokens, num_heads, dim_v = out.shape
    tensors = [device.rows(tensor) for tensor in (out_a, lse_a, out_b, lse_b, out, lse)]
    params = MergeParams(*tensors, tokens, num_heads, dim_v, DTYPES[out.dtype])
    kernel = f"merge_kernelI{MANGLED[out.dtype]}Li{pack}E"
    device.launch(kernel, -(-tokens * num_heads // 16), 256, params)
    device.read_back(out, lse)


def gather_latent(
    code: CodeObject,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    out: Tensor,
    *,
    layout: str,
    k_scale: Tensor | None = None,
    pack: int,
    first_block: int = 0,
) -> None:
    """With ``first_block`` the kernel is told of a larger cache, of which this is the part from that block on."""
    device = Device(code)
    block_table = torch.where(block_table < 0, block_table, block_table + first_block)
    params = GatherParams(
        cache=device.address(cache) - first_block * cache.stride(0) * cache.itemsize,
        block_stride=cache.stride(0),
        slot_stride=cache.stride(1),
        num_blocks=first_block + cache.shape[0],
        block_size=cache.shape[1],
        block_table=device.address(block_table),
        block_table_stride=block_table.stride(0),
        max_blocks=block_table.shape[1],
        cu_seqlens=device.address(cu_seqlens),
        starts=device.address(starts),
        batch=starts.numel(),
        out=device.address(out),
        out_rows=out.shape[0],
        out_stride=out.stride(0),
        dim=out.shape[1],
        layout=LAYOUTS[layout],
        out_dtype=DTYPES[out.dtype],
        k_scale=device.address(k_scale),
    )
    kernel = f"gather_kernelI{MANGLED[out.dtype]}Li{pack}ELNS_11CacheLayoutE{LAYOUTS[layout]}E"
    device.launch(kernel, -(-out.shape[0] // 32), 256, params)
    device.read_back(out)
