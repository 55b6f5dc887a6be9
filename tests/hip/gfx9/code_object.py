"""A code object: an ELF file with machine code and a descriptor per kernel."""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gfx9.errors import EmulatorError

# EF_AMDGPU_MACH of the ELF header's flags.
ARCHITECTURES = {0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}
SHT_PROGBITS, SHT_SYMTAB, SHT_DYNSYM = 1, 2, 11
DISASSEMBLY_LINE = re.compile(r"\s+(\S+)\s*(.*?)\s*// ([0-9A-F]{12}): ([0-9A-F ]{8,})")


@dataclass(frozen=True)
class Instruction:
    address: int
    size: int  # bytes
    name: str
    operands: str  # as the disassembler prints them, modifiers included
    first_word: int

    def __str__(self) -> str:
        return f"{self.address:#x}: {self.name} {self.operands}"


@dataclass(frozen=True)
class Kernel:
    """What a kernel descriptor says about the state that a wave starts in."""

    entry: int
    shared_bytes: int
    scratch_bytes: int
    argument_bytes: int
    user_sgprs: int
    argument_pointer_sgpr: int
    workgroup_id_sgprs: tuple[bool, bool, bool]  # x, y, z


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int


class CodeObject:
    def __init__(self, path: Path, objdump: str) -> None:
        self.data = Path(path).read_bytes()
        if self.data[:4] != b"\x7fELF":
            raise EmulatorError(f"{path}: expected an ELF code object (compiled with --no-gpu-bundle-output)")
        machine = struct.unpack_from("<I", self.data, 48)[0] & 0xFF
        if machine not in ARCHITECTURES:
            raise EmulatorError(f"{path}: expected one of {', '.join(ARCHITECTURES.values())}, got {machine:#x}")
        self.arch = ARCHITECTURES[machine]
        self.sections = self._read_sections()
        self.symbols = self._read_symbols()
        self.instructions = self._disassemble(path, objdump)

    def _read_sections(self) -> list[_Section]:
        (table,), (count,) = struct.unpack_from("<Q", self.data, 40), struct.unpack_from("<H", self.data, 60)
        sections = []
        for index in range(count):
            _, kind, _, address, offset, size, link, *_ = struct.unpack_from(
                "<IIQQQQIIQQ", self.data, table + 64 * index
            )
            sections.append(_Section(kind, address, offset, size, link))
        return sections

    def _read_symbols(self) -> dict[str, int]:
        symbols = {}
        for section in self.sections:
            if section.kind not in (SHT_SYMTAB, SHT_DYNSYM):
                continue
            names = self.sections[section.link].offset
            for offset in range(section.offset, section.offset + section.size, 24):
                name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", self.data, offset)
                end = self.data.index(b"\0", names + name)
                symbols[self.data[names + name : end].decode()] = value
        return symbols

    def _disassemble(self, path: Path, objdump: str) -> dict[int, Instruction]:
        text = subprocess.run(
            [objdump, "-d", f"--mcpu={self.arch}", str(path)], capture_output=True, text=True, check=True
        ).stdout
        instructions = {}
        for match in filter(None, map(DISASSEMBLY_LINE.match, text.splitlines())):
            words = match[4].split()
            address = int(match[3], 16)
            instructions[address] = Instruction(address, 4 * len(words), match[1], match[2], int(words[0], 16))
        return instructions

    def kernel_names(self) -> list[str]:
        return sorted(name.removesuffix(".kd") for name in self.symbols if name.endswith(".kd"))

    def kernel(self, name: str) -> Kernel:
        address = self.symbols[name + ".kd"]
        descriptor = next(
            self.data[section.offset + address - section.address :][:64]
            for section in self.sections
            if section.kind == SHT_PROGBITS and section.address <= address < section.address + section.size
        )
        shared, scratch, arguments = struct.unpack_from("<III", descriptor)
        (entry,) = struct.unpack_from("<q", descriptor, 16)
        (resources,) = struct.unpack_from("<I", descriptor, 52)
        properties, preload = struct.unpack_from("<HH", descriptor, 56)
        if preload:
            raise EmulatorError(f"{name}: preloaded kernel arguments are not modelled")
        # SGPRs before the pointer: the private segment's descriptor, the dispatch packet, the queue, where asked for.
        before = sum(count for bit, count in ((0, 4), (1, 2), (2, 2)) if properties >> bit & 1)
        if not properties >> 3 & 1:
            raise EmulatorError(f"{name}: expected a kernel that takes arguments")
        return Kernel(
            entry=address + entry,
            shared_bytes=shared,
            scratch_bytes=scratch,
            argument_bytes=arguments,
            user_sgprs=resources >> 1 & 31,
            argument_pointer_sgpr=before,
            workgroup_id_sgprs=tuple(bool(resources >> bit & 1) for bit in (7, 8, 9)),
        )
