"""Decodes instructions once, and runs the waves of each block until all have ended."""

from __future__ import annotations

import functools
import operator
import random
import re
from collections import Counter

import numpy as np

from gfx9 import matrix, memory, scalar, vector
from gfx9.code_object import CodeObject, Instruction, Kernel
from gfx9.errors import EmulatorError
from gfx9.operands import MASK32, Operand, parse
from gfx9.wave import LANES, Action, Stop, Wave

# Caches, priorities and clocks: nothing that changes a result here.
WITHOUT_EFFECT = {"s_nop", "s_setprio", "s_sleep", "buffer_inv", "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol"}
STOPS = {"s_barrier": Stop.BARRIER, "s_endpgm": Stop.END}


class Emulator:
    """Runs the kernels of one code object. ``wave_order`` seeds the order in which waves run between barriers."""

    def __init__(self, code: CodeObject, *, memory_bytes: int = 1 << 26, wave_order: int = 0) -> None:
        self.code = code
        self.memory = memory.GlobalMemory(memory_bytes)
        self.random = random.Random(wave_order)
        self.executed: Counter[str] = Counter()  # instructions by name, one per wave
        # Of every vector memory instruction that was waited for: the MFMA instructions in between.
        self.waited: list[tuple[str, int]] = []
        self._decoded: dict[int, tuple[Action, Instruction, int]] = {}

    def launch(self, name: str, num_blocks: int, threads: int, arguments: bytes) -> None:
        """A grid of ``num_blocks`` blocks, one after the other. ``arguments`` is the kernel argument segment."""
        kernel = self.code.kernel(name)
        if kernel.scratch_bytes:
            raise EmulatorError(f"{name}: {kernel.scratch_bytes} bytes of scratch (spills) are not modelled")
        if len(arguments) != kernel.argument_bytes:
            raise EmulatorError(f"{name}: expected {kernel.argument_bytes} bytes of arguments, got {len(arguments)}")
        pointer = self.memory.upload(np.frombuffer(arguments, np.uint8))
        with np.errstate(all="ignore"):
            for block in range(num_blocks):
                self._run_block(kernel, block, threads, pointer)

    def _run_block(self, kernel: Kernel, block: int, threads: int, arguments: int) -> None:
        shared = memory.SharedMemory(kernel.shared_bytes)
        waves = []
        for first in range(0, threads, LANES):
            wave = Wave(first // LANES, min(LANES, threads - first), kernel.entry, shared)
            wave.vector[0] = np.arange(first, first + LANES)  # the thread's index, x alone
            wave.scalar[kernel.argument_pointer_sgpr] = arguments & MASK32
            wave.scalar[kernel.argument_pointer_sgpr + 1] = arguments >> 32
            for k, wanted in enumerate(kernel.workgroup_id_sgprs):
                if wanted:
                    wave.scalar[kernel.user_sgprs + sum(kernel.workgroup_id_sgprs[:k])] = block if k == 0 else 0
            waves.append(wave)
        running = waves
        while running:
            waiting = []
            for wave in self.random.sample(running, len(running)):
                if self._run_until_stop(wave, block) is Stop.BARRIER:
                    waiting.append(wave)
            shared.pass_barrier(waiting)
            running = waiting

    def _run_until_stop(self, wave: Wave, block: int) -> Stop:
        while True:
            action, instruction, registers = self._decode(wave.address)
            self.executed[instruction.name] += 1
            try:
                if wave.in_flight & registers:  # beforehand, for speed
                    wave.require_loaded(registers)
                outcome = action(wave)
            except EmulatorError as error:
                raise EmulatorError(f"{instruction} (block {block}, wave {wave.index}): {error}") from None
            wave.address = outcome if isinstance(outcome, int) else instruction.address + instruction.size
            if isinstance(outcome, Stop):
                return outcome

    # ---- decoding

    def decode_all(self) -> None:
        """Raises for the first instruction of the code object that is not modelled."""
        for address in self.code.instructions:
            self._decode(address)

    def _decode(self, address: int) -> tuple[Action, Instruction, int]:
        """The third is the registers that it needs."""
        decoded = self._decoded.get(address)
        if decoded is None:
            instruction = self.code.instructions.get(address)
            if instruction is None:
                raise EmulatorError(f"{address:#x} is not the address of an instruction")
            try:
                action, registers = self._action_of(instruction)
            except EmulatorError as error:
                raise EmulatorError(f"{instruction}: {error}") from None
            if action is None:
                raise EmulatorError(f"{instruction}: not modelled")
            decoded = self._decoded[address] = (action, instruction, registers)
        return decoded

    def _action_of(self, instruction: Instruction) -> tuple[Action | None, int]:
        name = instruction.name
        if name in WITHOUT_EFFECT:
            return lambda w: None, 0
        if name in STOPS:
            return lambda w: STOPS[name], 0
        if name == "s_waitcnt":
            return self._wait(instruction.operands), 0
        if name.startswith(("s_branch", "s_cbranch")):  # the target is in the instruction word
            return scalar.decode(instruction, []), 0
        texts, modifiers = parse(instruction.operands)
        operands = [Operand(text) for text in texts]
        if name.startswith("v_mfma"):
            action = matrix.decode(name, operands, modifiers, self.code.arch)
        elif name.startswith("v_"):
            action = vector.decode(name, operands, modifiers)
        elif name.startswith(("s_load", "ds_", "global_", "buffer_")):
            action = memory.decode(name, operands, modifiers, self.memory)
        else:
            action = scalar.decode(instruction, operands)
        needed = operands[1:] if memory.is_load(name, modifiers) else operands
        return action, functools.reduce(operator.or_, (operand.registers for operand in needed), 0)

    def _wait(self, operands: str) -> Action | None:
        allowed = {name: int(count) for name, count in re.findall(r"(\w+)\((\d+)\)", operands)}
        if not allowed or set(allowed) - {"vmcnt", "lgkmcnt", "expcnt"}:
            return None

        def execute(w: Wave) -> None:
            for issued in w.wait(allowed.get("vmcnt"), allowed.get("lgkmcnt")):
                self.waited.append((issued.name, w.matrix_steps - issued.matrix_steps))

        return execute
