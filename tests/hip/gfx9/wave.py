"""The state of a wave: registers of 64 lanes, scalar registers, the execution mask."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from gfx9.operands import MASK32, SPECIAL_SGPRS, Kind, Operand

if TYPE_CHECKING:
    from gfx9.memory import SharedMemory

LANES = 64
LANE = np.arange(LANES)
VCC, M0, EXEC = SPECIAL_SGPRS["vcc"], SPECIAL_SGPRS["m0"], SPECIAL_SGPRS["exec"]
UNINITIALISED = 0xDEADBEEF


class Stop(Enum):
    """Why a wave does not go on with its next instruction."""

    BARRIER = "barrier"
    END = "end"


# An executed instruction says where to go on: nowhere special (None), at an address, or not at all for now.
Action = Callable[["Wave"], "int | Stop | None"]


def bits_to_mask(bits: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little").astype(bool)


def mask_to_bits(mask: np.ndarray) -> int:
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def as_float(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32)


def as_words(floats: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(floats, np.float32).view(np.uint32)


class Wave:
    def __init__(self, index: int, lanes: int, entry: int, shared: SharedMemory) -> None:
        self.index = index
        self.shared = shared
        self.address = entry
        self.vector = np.full((512, LANES), UNINITIALISED, np.uint32)
        self.scalar = [0] * 128
        self.scc = 0
        self.epoch = 0  # barriers passed
        self.matrix_steps = 0  # MFMA instructions executed
        self.in_flight: list[tuple[str, int]] = []  # vector memory instructions and matrix_steps then, oldest first
        self.set_exec((1 << lanes) - 1)

    def set_exec(self, bits: int) -> None:
        self.scalar[EXEC], self.scalar[EXEC + 1] = bits & MASK32, bits >> 32
        self.active = bits_to_mask(bits)
        self.all_active = bool(self.active.all())

    # ---- scalar registers

    def scalar32(self, operand: Operand) -> int:
        return self.scalar[operand.index] if operand.kind is Kind.SCALAR else operand.value & MASK32

    def scalar64(self, operand: Operand) -> int:
        if operand.kind is Kind.SCALAR:
            return self.scalar[operand.index] | self.scalar[operand.index + 1] << 32
        return operand.value & (1 << 64) - 1

    def write_scalar32(self, operand: Operand, value: int) -> None:
        self.scalar[operand.index] = value & MASK32
        if operand.index >= EXEC:
            self.set_exec(self.scalar[EXEC] | self.scalar[EXEC + 1] << 32)

    def write_scalar64(self, operand: Operand, value: int) -> None:
        self.scalar[operand.index], self.scalar[operand.index + 1] = value & MASK32, value >> 32 & MASK32
        if operand.index >= EXEC:
            self.set_exec(value & (1 << 64) - 1)

    # ---- vector operands: arrays of 64 lanes, or of one value for all lanes

    def words(self, operand: Operand, part: int = 0) -> np.ndarray:
        """32 bits per lane; ``part`` counts registers of a group."""
        if operand.kind is Kind.VECTOR:
            return self.vector[operand.index + part]
        if operand.kind is Kind.SCALAR:
            return np.array([self.scalar[operand.index + part]], np.uint32)
        if part:  # the upper half of a sign-extended constant
            return np.array([MASK32 if operand.value < 0 else 0], np.uint32)
        return operand.lanes

    def lanes(self, operand: Operand, part: int = 0) -> np.ndarray:
        return np.broadcast_to(self.words(operand, part), LANES)

    def floats(self, operand: Operand) -> np.ndarray:
        value = as_float(self.words(operand))
        value = np.abs(value) if operand.absolute else value
        return -value if operand.negate else value

    def words64(self, operand: Operand) -> np.ndarray:
        return self.words(operand).astype(np.uint64) | self.words(operand, 1).astype(np.uint64) << np.uint64(32)

    def write(self, register: int, value: np.ndarray) -> None:
        if self.all_active:
            self.vector[register] = value
        else:
            np.copyto(self.vector[register], np.broadcast_to(value, LANES), where=self.active)

    def write64(self, register: int, value: np.ndarray) -> None:
        value = np.broadcast_to(value, LANES)
        self.write(register, (value & np.uint64(MASK32)).astype(np.uint32))
        self.write(register + 1, (value >> np.uint64(32)).astype(np.uint32))

    def write_mask(self, operand: Operand, condition: np.ndarray) -> None:
        """One bit per lane into a scalar register pair; 0 for lanes that are not active."""
        self.write_scalar64(operand, mask_to_bits(np.broadcast_to(condition, LANES) & self.active))
