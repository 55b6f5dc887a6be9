"""The state of a wave: registers of 64 lanes, scalar registers, the execution mask."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from gfx9.errors import EmulatorError
from gfx9.operands import MASK32, SPECIAL_SGPRS, VECTOR_REGISTERS, Kind, Operand

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


@dataclass
class Issued:
    """A memory instruction that no s_waitcnt has covered yet."""

    name: str
    registers: int  # that it loads, see Operand.registers
    matrix_steps: int  # of the wave when it was issued
    touched: list[tuple[np.ndarray, int]] = field(default_factory=list)  # dwords of shared memory, and as what


def sum_of_registers(instructions: Iterable[Issued]) -> int:
    return functools.reduce(operator.or_, (issued.registers for issued in instructions), 0)


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
        self.vector = np.full((VECTOR_REGISTERS, LANES), UNINITIALISED, np.uint32)
        self.scalar = [0] * 128
        self.scc = 0
        self.matrix_steps = 0  # MFMA instructions executed
        self.vector_memory: list[Issued] = []  # counted by vmcnt, oldest first
        self.shared_memory: list[Issued] = []  # counted by lgkmcnt, oldest first
        self.scalar_loads: list[Issued] = []  # counted by lgkmcnt too, but they may finish in any order
        self.in_flight = 0  # registers that all of them load
        self.set_exec((1 << lanes) - 1)

    def set_exec(self, bits: int) -> None:
        self.scalar[EXEC], self.scalar[EXEC + 1] = bits & MASK32, bits >> 32
        self.active = bits_to_mask(bits)
        self.all_active = bool(self.active.all())

    # ---- memory instructions in flight

    def issue(self, queue: list[Issued], name: str, registers: int) -> None:
        if self.in_flight & registers:
            # Vector memory answers in order: a later load may go to the registers of an earlier one that nobody used.
            earlier = sum_of_registers(queue) if queue is self.vector_memory else 0
            self.require_loaded(registers & ~earlier)
        queue.append(Issued(name, registers, self.matrix_steps))
        self.in_flight |= registers

    def require_loaded(self, registers: int) -> None:
        if self.in_flight & registers:
            raise EmulatorError("touches a register before the wait for what is loaded into it")

    def wait(self, vmcnt: int | None, lgkmcnt: int | None) -> list[Issued]:
        """Vector memory instructions that are done from here on. None: no wait for instructions of this kind."""
        done: list[Issued] = []
        if vmcnt is not None:
            left = max(len(self.vector_memory) - vmcnt, 0)
            done, self.vector_memory = self.vector_memory[:left], self.vector_memory[left:]
        if lgkmcnt is not None:
            # Of those allowed to be left, all may be of shared memory.
            del self.shared_memory[: max(len(self.shared_memory) - lgkmcnt, 0)]
            if lgkmcnt == 0:
                self.scalar_loads.clear()
        self.in_flight = sum_of_registers([*self.vector_memory, *self.shared_memory, *self.scalar_loads])
        return done

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
