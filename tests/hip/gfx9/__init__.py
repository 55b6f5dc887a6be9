"""Executes compiled gfx90a, gfx942 and gfx950 code objects on the CPU, instruction by instruction.

It interprets the text that llvm-objdump prints of the machine code, after AMD's public ISA documents and the documented
register layouts of the matrix instructions. An opcode, an operand or a modifier that it does not know is an error,
never a guess. While it runs it checks that

- global accesses stay inside the buffers that were uploaded (each lies amid memory that belongs to nobody),
- accesses to shared memory stay in range and aligned,
- no two waves touch the same dword of shared memory between two barriers where one of them writes it,
- an access to shared memory that the wave has not waited for at a barrier counts behind it, too,
- no instruction touches a register between a load into it and the s_waitcnt that covers that load.

Waves may be run in any order, so that a result that depends on it shows. What it does not model: time, caches, the
hazards that the compiler has to fill with s_nop, the last bit of the transcendental instructions (correctly rounded
here, one ulp on hardware), and what the memory system may reorder between waves and blocks.

    emulator = Emulator(CodeObject(path))
    address = emulator.memory.upload(array)
    emulator.launch("kernel_name", num_blocks, threads_per_block, kernel_arguments)
    array = emulator.memory.download(address, array.dtype, array.shape)
"""

from gfx9.code_object import CodeObject
from gfx9.emulator import Emulator
from gfx9.errors import EmulatorError

__all__ = ["CodeObject", "Emulator", "EmulatorError"]
