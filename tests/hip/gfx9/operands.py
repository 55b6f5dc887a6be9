"""Operands and modifiers of an instruction, from the disassembler's text."""

from __future__ import annotations

import re
import struct
from enum import Enum

import numpy as np

from gfx9.errors import EmulatorError

MASK32 = 0xFFFFFFFF
ACCUMULATORS = 256  # AGPR n is register 256 + n of the unified file
VECTOR_REGISTERS = 512
SPECIAL_SGPRS = {"vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126, "exec_hi": 127}
INVERSE_TWO_PI = 0x3E22F983


class Kind(Enum):
    VECTOR = "v"
    SCALAR = "s"
    CONSTANT = "c"
    OFF = "off"


class Operand:
    """A group of ``count`` registers from ``index`` on or a constant (``value``), and its modifiers."""

    def __init__(self, text: str) -> None:
        self.negate = text.startswith("-") and not re.match(r"-[\d.]", text)
        text = text[1:] if self.negate else text
        self.absolute = text.startswith("|")
        text = text.strip("|")
        self.sign_extend = text.startswith("sext(")  # of a part of a register
        text = text.removeprefix("sext(").removesuffix(")")
        self.index = self.value = self.count = 0
        register = re.fullmatch(r"([vas])(\d+)()", text) or re.fullmatch(r"([vas])\[(\d+):(\d+)\]", text)
        if register:
            self.kind = Kind.SCALAR if register[1] == "s" else Kind.VECTOR
            self.index = int(register[2]) + (ACCUMULATORS if register[1] == "a" else 0)
            self.count = int(register[3] or register[2]) - int(register[2]) + 1
        elif text in SPECIAL_SGPRS:
            self.kind, self.index = Kind.SCALAR, SPECIAL_SGPRS[text]
            self.count = 2 if text in ("vcc", "exec") else 1
        elif text == "off":
            self.kind = Kind.OFF
        else:
            self.kind, self.value = Kind.CONSTANT, constant(text)
        self.lanes = np.array([self.value & MASK32], np.uint32)  # of a constant, one for all lanes

    @property
    def registers(self) -> int:
        """One bit per register of the group, scalar ones above the vector ones."""
        first = self.index + (VECTOR_REGISTERS if self.kind is Kind.SCALAR else 0)
        return ((1 << self.count) - 1) << first


def constant(text: str) -> int:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"0x[0-9a-f]+", text):
        return int(text, 16)
    if text == "0.15915494":
        return INVERSE_TWO_PI
    if re.fullmatch(r"-?\d+\.\d+", text):
        return struct.unpack("<I", struct.pack("<f", float(text)))[0]
    raise EmulatorError(f"operand {text} is not modelled")


def parse(text: str) -> tuple[list[str], dict[str, str]]:
    """Operands and modifiers: ``v1, s[2:3], 0 offen offset:16`` is (v1, s[2:3], 0) and {offen: "", offset: "16"}."""
    operands = [part.strip() for part in re.split(r",(?![^\[]*\])", text)] if text else []
    modifiers = {}
    if operands:
        operands[-1], *rest = operands[-1].split()
        modifiers = dict(part.partition(":")[::2] for part in rest)
    return operands, modifiers


def signed32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def signed16(value: int) -> int:
    return ((value & 0xFFFF) ^ 0x8000) - 0x8000


def bit_list(modifiers: dict[str, str], name: str, default: int, count: int) -> list[int]:
    """``op_sel:[0,1]`` as [0, 1]."""
    if name not in modifiers:
        return [default] * count
    return [int(bit) for bit in modifiers[name].strip("[]").split(",")]
