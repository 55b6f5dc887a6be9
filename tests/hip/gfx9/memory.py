"""Global and shared memory, and the instructions that use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

import numpy as np

from gfx9.errors import EmulatorError
from gfx9.operands import Kind, Operand, signed32
from gfx9.wave import LANES, VCC, Action, Wave

U32, U64 = np.uint32, np.uint64
DWORDS = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}
BASE_ADDRESS = 0x7F0000000000


class GlobalMemory:
    """Buffers amid memory that belongs to nobody: touching that is an error."""

    GAP = 4096

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.belongs = np.zeros(size, bool)
        self.words = self.bytes.view(U32)
        self.top = self.GAP

    def upload(self, array: np.ndarray) -> int:
        """Copies an array in; returns its address, a multiple of 256."""
        raw = np.ascontiguousarray(array).view(np.uint8).ravel()
        first, end = self.top, self.top + raw.size
        if end + self.GAP > self.bytes.size:
            raise EmulatorError(f"memory: expected at most {self.bytes.size} bytes, got more")
        self.bytes[first:end] = raw
        self.belongs[first:end] = True
        self.top = (end + self.GAP + 255) // 256 * 256
        return BASE_ADDRESS + first

    def download(self, address: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        first = address - BASE_ADDRESS
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[first : first + size].copy().view(dtype).reshape(shape)

    def offsets(self, addresses: np.ndarray, size: int, alignment: int) -> np.ndarray:
        """Checked positions of accesses of ``size`` bytes."""
        offsets = addresses.astype(np.int64) - BASE_ADDRESS
        if offsets.size == 0:
            return offsets
        if offsets.min() < 0 or offsets.max() + size > self.bytes.size:
            raise EmulatorError("global access outside all buffers")
        if not (self.belongs[offsets].all() and self.belongs[offsets + size - 1].all()):
            raise EmulatorError("global access outside all buffers")
        if (offsets % alignment).any():
            raise EmulatorError(f"global access that is not a multiple of {alignment} bytes")
        return offsets


class Access(Enum):
    """What waves do with a dword of shared memory; the value is the place of their bits, one per wave."""

    READ = 0
    WRITE = 16
    UPDATE = 32  # atomic


RACES = {
    Access.READ: (Access.WRITE, Access.UPDATE),
    Access.WRITE: (Access.READ, Access.WRITE, Access.UPDATE),
    Access.UPDATE: (Access.READ, Access.WRITE),
}
WAVES = 0xFFFF


class SharedMemory:
    """LDS of one block. Between two barriers, a dword that one wave writes must not be touched by another."""

    FILL = 0xCC

    def __init__(self, size: int) -> None:
        size = max((size + 511) // 512 * 512, 512)  # in these units it is allocated
        self.bytes = np.full(size, self.FILL, np.uint8)
        self.words = self.bytes.view(U32)
        self.touched_by = np.zeros(size // 4, np.int64)  # since the last barrier, see Access

    def check(self, w: Wave, addresses: np.ndarray, size: int, alignment: int, access: Access) -> None:
        if addresses.size == 0:
            return
        if addresses.min() < 0 or addresses.max() + size > self.bytes.size:
            raise EmulatorError("shared memory: address out of range")
        if (addresses % alignment).any():
            raise EmulatorError(f"shared memory: address that is not a multiple of {alignment}")
        words = (addresses[:, None] >> 2) + np.arange(size // 4)
        touched_by, others = self.touched_by[words], WAVES & ~(1 << w.index)
        if (touched_by & sum(others << other.value for other in RACES[access])).any():
            raise EmulatorError(
                f"shared memory race: a {access.name} of what another wave touched since the last barrier, or before "
                "it without waiting"
            )
        me = 1 << w.index << access.value
        self.touched_by[words] = touched_by | me
        w.shared_memory[-1].touched.append((words, me))

    def pass_barrier(self, waves: Sequence[Wave]) -> None:
        """What a wave did not wait for may happen behind the barrier too."""
        self.touched_by.fill(0)
        for wave in waves:
            for issued in wave.shared_memory:
                for words, bit in issued.touched:
                    self.touched_by[words] |= bit


def is_load(name: str, modifiers: dict[str, str]) -> bool:
    """Whether the first operand is what the instruction loads. An atomic's modifier is gfx942's or gfx90a's."""
    returns = "sc0" in modifiers or "glc" in modifiers
    return bool(re.match(r"s_load|ds_read|ds_bpermute|(global|buffer)_load", name)) or ("_atomic_" in name and returns)


def decode(name: str, operands: list[Operand], modifiers: dict[str, str], memory: GlobalMemory) -> Action | None:
    """Values are there at once, but the registers that they are in must not be touched before they were waited for."""
    access = None
    if name.startswith("s_load_dword"):
        access = scalar_load(name, operands, modifiers, memory)
    elif name.startswith("ds_"):
        access = shared_access(name, operands, modifiers)
    elif name.startswith("buffer_"):
        access = buffer_access(name, operands, modifiers, memory)
    elif name.startswith("global_atomic_add"):
        access = global_atomic_add(operands, modifiers, memory)
    elif name.startswith("global_"):
        access = global_access(name, operands, modifiers, memory)
    if access is None:
        return None
    registers = operands[0].registers if is_load(name, modifiers) else 0
    counter = {"s": "scalar_loads", "d": "shared_memory"}.get(name[0], "vector_memory")

    def issue(w: Wave) -> None:
        w.issue(getattr(w, counter), name, registers)
        access(w)

    return issue


def scalar_load(name: str, operands: list[Operand], modifiers: dict[str, str], memory: GlobalMemory) -> Action | None:
    count = int(name.removeprefix("s_load_dword").removeprefix("x") or 1)
    to, base, offset = operands
    if to.index >= VCC:  # what branches read without naming it
        return None

    def execute(w: Wave) -> None:
        address = w.scalar64(base) + w.scalar32(offset) + int(modifiers.get("offset", "0"), 0)
        first = int(memory.offsets(np.array([address], U64), 4 * count, 4)[0]) // 4
        w.scalar[to.index : to.index + count] = [int(word) for word in memory.words[first : first + count]]

    return execute


# ---- Global memory ---------------------------------------------------------------------------------------------------


def global_addresses(w: Wave, address: Operand, base: Operand, offset: int) -> np.ndarray:
    """Of all lanes: 64 bits per lane, or 32 bits per lane above a scalar base."""
    wide = base.kind is Kind.OFF
    addresses = w.words64(address) if wide else U64(w.scalar64(base)) + w.words(address).astype(U64)
    return np.broadcast_to(addresses + np.array(offset, np.int64).astype(U64), LANES)


def global_access(name: str, operands: list[Operand], modifiers: dict[str, str], memory: GlobalMemory) -> Action | None:
    if set(modifiers) - {"offset", "nt", "sc0", "sc1", "glc", "slc"}:
        return None
    offset = int(modifiers.get("offset", "0"), 0)
    _, direction, kind = name.split("_", 2)
    store = direction == "store"
    data, address, base = (operands[1], operands[0], operands[2]) if store else operands
    if kind in DWORDS:
        count = DWORDS[kind]

        def access_dwords(w: Wave) -> None:
            # Dword accesses may lie at any multiple of four bytes.
            at = memory.offsets(global_addresses(w, address, base, offset)[w.active], 4 * count, 4) >> 2
            for k in range(count):
                if store:
                    memory.words[at + k] = w.vector[data.index + k, w.active]
                else:
                    w.vector[data.index + k, w.active] = memory.words[at + k]

        return access_dwords
    size = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2}.get(kind)
    if size is None:
        return None

    def access_part(w: Wave) -> None:
        at = memory.offsets(global_addresses(w, address, base, offset)[w.active], size, size)
        if store:
            for k in range(size):
                memory.bytes[at + k] = w.vector[data.index, w.active] >> U32(8 * k) & U32(0xFF)
        else:
            w.vector[data.index, w.active] = sum(memory.bytes[at + k].astype(U32) << U32(8 * k) for k in range(size))

    return access_part


def global_atomic_add(operands: list[Operand], modifiers: dict[str, str], memory: GlobalMemory) -> Action | None:
    if set(modifiers) - {"offset", "sc0", "sc1", "glc"}:
        return None
    offset = int(modifiers.get("offset", "0"), 0)
    returns = is_load("global_atomic_add", modifiers)
    to, (address, data, base) = (operands[0], operands[1:]) if returns else (None, operands)

    def execute(w: Wave) -> None:
        at = memory.offsets(global_addresses(w, address, base, offset)[w.active], 4, 4) >> 2
        for lane, word, value in zip(np.flatnonzero(w.active), at, w.lanes(data)[w.active], strict=True):
            previous = memory.words[word]
            memory.words[word] = previous + value
            if to is not None:
                w.vector[to.index, lane] = previous

    return execute


def buffer_access(name: str, operands: list[Operand], modifiers: dict[str, str], memory: GlobalMemory) -> Action | None:
    """Raw buffers: a load beyond the descriptor's number of bytes gives 0, a store there is dropped."""
    _, direction, kind = name.split("_", 2)
    if set(modifiers) - {"offset", "offen", "nt", "sc0", "sc1"} or kind not in DWORDS:
        return None
    store, per_lane, count = direction == "store", "offen" in modifiers, DWORDS[kind]
    data, descriptor, scalar_offset = operands[0], operands[-2], operands[-1]
    constant = int(modifiers.get("offset", "0"), 0)

    def execute(w: Wave) -> None:
        first = descriptor.index
        stride = w.scalar[first + 1] >> 16 & 0x3FFF
        if stride:
            raise EmulatorError("buffers of records are not modelled")
        base = w.scalar64(descriptor) & (1 << 48) - 1
        num_bytes, step = w.scalar[first + 2], w.scalar32(scalar_offset)
        offsets = np.full(LANES, constant, np.int64)
        if per_lane:
            offsets += w.lanes(operands[1]).astype(np.int64)
        offsets = offsets[w.active]
        for k in range(count):
            inside = offsets + step + 4 * k < num_bytes
            at = np.zeros(len(offsets), np.int64)
            at[inside] = memory.offsets((base + offsets[inside] + step + 4 * k).astype(U64), 4, 4) >> 2
            if store:
                memory.words[at[inside]] = w.vector[data.index + k, w.active][inside]
            else:
                w.vector[data.index + k, w.active] = np.where(inside, memory.words[at], U32(0))

    return execute


# ---- Shared memory ---------------------------------------------------------------------------------------------------

SHARED_NAME = re.compile(r"ds_(read|write)(2?)(st64)?_[bu](8|16|32|64|96|128)")
SHARED_ATOMICS = {
    "ds_add_u32": lambda a, b: a + b,
    "ds_min_i32": lambda a, b: min(signed32(a), signed32(b)),
    "ds_max_i32": lambda a, b: max(signed32(a), signed32(b)),
}


def shared_access(name: str, operands: list[Operand], modifiers: dict[str, str]) -> Action | None:
    if set(modifiers) - {"offset", "offset0", "offset1"}:
        return None
    offset = int(modifiers.get("offset", "0"), 0)
    if name == "ds_bpermute_b32":
        return shared_permute(operands, offset)
    if name in SHARED_ATOMICS:
        return shared_atomic(name, operands, offset)
    match = SHARED_NAME.fullmatch(name)
    if match is None:
        return None
    reads, two, far = match[1] == "read", bool(match[2]), bool(match[3])
    size = int(match[4]) // 8
    unit = size * (64 if far else 1)
    offsets = [int(modifiers.get(f"offset{k}", "0"), 0) * unit for k in (0, 1)] if two else [offset]
    address = operands[1 if reads else 0]
    # Either one group of registers for all parts, or one operand per part.
    data = [(operands[0], k * size // 4) for k in range(2)] if reads else [(operand, 0) for operand in operands[1:]]
    count = size // 4
    if count == 0:
        return None

    def execute(w: Wave) -> None:
        base = w.lanes(address)[w.active]
        for part, (operand, first) in zip(offsets, data, strict=False):
            addresses = (base + U32(part)).astype(np.int64)  # wraps: a base may lie below 0
            # Wide accesses need multiples of eight bytes at least.
            w.shared.check(w, addresses, size, min(size, 8), Access.READ if reads else Access.WRITE)
            at = addresses >> 2
            for k in range(count):
                if reads:
                    w.vector[operand.index + first + k, w.active] = w.shared.words[at + k]
                else:
                    w.shared.words[at + k] = w.lanes(operand, k)[w.active]

    return execute


def shared_atomic(name: str, operands: list[Operand], offset: int) -> Action:
    """Without a result. Waves may race for it, but not with plain accesses."""
    address, data = operands
    combine = SHARED_ATOMICS[name]

    def execute(w: Wave) -> None:
        addresses = (w.lanes(address)[w.active] + U32(offset)).astype(np.int64)
        w.shared.check(w, addresses, 4, 4, Access.UPDATE)
        for word, value in zip(addresses >> 2, w.lanes(data)[w.active], strict=True):
            w.shared.words[word] = combine(int(w.shared.words[word]), int(value)) & 0xFFFFFFFF

    return execute


def shared_permute(operands: list[Operand], offset: int) -> Action:
    """ds_bpermute_b32: each lane reads another lane's register, 0 where that is not active."""
    to, address, data = operands

    def execute(w: Wave) -> None:
        source = (w.lanes(address) + U32(offset) >> U32(2)).astype(int) & 63
        values = np.where(w.active, w.lanes(data), U32(0))
        w.write(to.index, values[source])

    return execute
