"""Decodes instructions once, and runs the waves of each block until all have ended."""

from __future__ import annotations

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


class Emulator:
    """Runs the kernels of one code object. ``wave_order`` seeds the order in which waves run between barriers."""

    def __init__(self, code: CodeObject, *, memory_bytes: int = 1 << 26, wave_order: int = 0) -> None:
        self.code = code
        self.memory = memory.GlobalMemory(memory_bytes)
        self.random = random.Random(wave_order)
        self.executed: Counter[str] = Counter()  # instructions by name, one per wave
        # Of every vector memory instruction that was waited for: the MFMA instructions in between.
        self.waited: list[tuple[str, int]] = []
        self._decoded: dict[int, tuple[Action, Instruction]] = {}

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
                    wave.epoch += 1
                    waiting.append(wave)
            running = waiting

    def _run_until_stop(self, wave: Wave, block: int) -> Stop:
        while True:
            action, instruction = self._decode(wave.address)
            self.executed[instruction.name] += 1
            try:
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

    def _decode(self, address: int) -> tuple[Action, Instruction]:
        decoded = self._decoded.get(address)
        if decoded is None:
            instruction = self.code.instructions.get(address)
            if instruction is None:
                raise EmulatorError(f"{address:#x} is not the address of an instruction")
            try:
                action = self._action_of(instruction)
            except EmulatorError as error:
                raise EmulatorError(f"{instruction}: {error}") from None
            if action is None:
                raise EmulatorError(f"{instruction}: not modelled")
            decoded = self._decoded[address] = (action, instruction)
        return decoded

    def _action_of(self, instruction: Instruction) -> Action | None:
        name = instruction.name
        if name in WITHOUT_EFFECT:
            return lambda w: None
        if name == "s_barrier":
            return lambda w: Stop.BARRIER
        if name == "s_endpgm":
            return lambda w: Stop.END
        if name == "s_waitcnt":
            return self._wait(instruction.operands)
        texts, modifiers = parse(instruction.operands)
        if name.startswith(("s_branch", "s_cbranch")):
            texts = []  # the target is in the instruction word
        operands = [Operand(text) for text in texts]
        if name.startswith("v_mfma"):
            return matrix.decode(name, operands, modifiers, self.code.arch)
        if name.startswith("v_"):
            return vector.decode(name, operands, modifiers)
        if name.startswith(("s_load", "ds_", "global_", "buffer_")):
            return memory.decode(name, operands, modifiers, self.memory)
        return scalar.decode(instruction, operands)

    def _wait(self, operands: str) -> Action:
        """Values are there at once; only how far ahead of their use they were asked for is noted."""
        match = re.search(r"vmcnt\((\d+)\)", operands)
        if match is None:
            return lambda w: None
        allowed = int(match[1])

        def execute(w: Wave) -> None:
            while len(w.in_flight) > allowed:
                issued, steps = w.in_flight.pop(0)
                self.waited.append((issued, w.matrix_steps - steps))

        return execute
