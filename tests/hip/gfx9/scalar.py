"""Scalar instructions: arithmetic on SGPRs, compares, branches."""

from __future__ import annotations

import operator
from collections.abc import Callable

from gfx9.code_object import Instruction
from gfx9.operands import MASK32, Operand, signed16, signed32
from gfx9.wave import EXEC, VCC, Action, Wave

MASK64 = (1 << 64) - 1
COMPARISONS = {
    "eq": operator.eq,
    "lg": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
CONDITIONS: dict[str, Callable[[Wave], object]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: not (w.scalar[VCC] | w.scalar[VCC + 1]),
    "s_cbranch_vccnz": lambda w: w.scalar[VCC] | w.scalar[VCC + 1],
    "s_cbranch_execz": lambda w: not (w.scalar[EXEC] | w.scalar[EXEC + 1]),
    "s_cbranch_execnz": lambda w: w.scalar[EXEC] | w.scalar[EXEC + 1],
}


def reverse_bits(value: int) -> int:
    return int(f"{value:032b}"[::-1], 2)


def first_one(value: int) -> int:
    return (value & -value).bit_length() - 1


def signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# Results whose SCC says whether they are not 0.
SCC_IF_NONZERO_32: dict[str, Callable[..., int]] = {
    "s_and_b32": lambda a, b: a & b,
    "s_or_b32": lambda a, b: a | b,
    "s_xor_b32": lambda a, b: a ^ b,
    "s_andn2_b32": lambda a, b: a & ~b,
    "s_lshl_b32": lambda a, b: a << (b & 31),
    "s_lshr_b32": lambda a, b: a >> (b & 31),
    "s_ashr_i32": lambda a, b: signed32(a) >> (b & 31),
    "s_bfe_u32": lambda a, b: a >> (b & 31) & ((1 << (b >> 16 & 127)) - 1),
    "s_abs_i32": lambda a: abs(signed32(a)),
}
SCC_IF_NONZERO_64: dict[str, Callable[..., int]] = {
    "s_and_b64": lambda a, b: a & b,
    "s_or_b64": lambda a, b: a | b,
    "s_xor_b64": lambda a, b: a ^ b,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_orn2_b64": lambda a, b: a | ~b,
    "s_not_b64": lambda a: ~a,
}
SHIFTS_64: dict[str, Callable[[int, int], int]] = {
    "s_lshl_b64": lambda a, b: a << b,
    "s_lshr_b64": lambda a, b: a >> b,
    "s_ashr_i64": lambda a, b: signed64(a) >> b,
}
SCC_UNTOUCHED: dict[str, Callable[..., int]] = {
    "s_mov_b32": lambda a: a,
    "s_brev_b32": reverse_bits,
    "s_ff1_i32_b32": first_one,
    "s_flbit_i32_b32": lambda a: 32 - a.bit_length() if a else MASK32,
    "s_mul_i32": lambda a, b: signed32(a) * signed32(b),
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_mul_hi_i32": lambda a, b: signed32(a) * signed32(b) >> 32,
    "s_pack_ll_b32_b16": lambda a, b: a & 0xFFFF | b << 16,
}
SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, exec_: a & exec_,
    "s_or_saveexec_b64": lambda a, exec_: a | exec_,
    "s_andn2_saveexec_b64": lambda a, exec_: a & ~exec_,
}


def decode(instruction: Instruction, operands: list[Operand]) -> Action | None:
    name = instruction.name
    following = instruction.address + instruction.size
    if condition := CONDITIONS.get(name):
        target = following + 4 * signed16(instruction.first_word)
        return lambda w: target if condition(w) else None
    if name.startswith("s_cmp_"):
        return compare(name, operands)
    if name.startswith("s_bitcmp"):
        expected = int(name[8])

        def bit_compare(w: Wave) -> None:
            w.scc = int((w.scalar32(operands[0]) >> (w.scalar32(operands[1]) & 31) & 1) == expected)

        return bit_compare
    return arithmetic(name, operands)


def compare(name: str, operands: list[Operand]) -> Action | None:
    relation, _, kind = name.removeprefix("s_cmp_").partition("_")
    test = COMPARISONS[relation]
    if kind == "u64":
        read = Wave.scalar64
    elif kind == "u32":
        read = Wave.scalar32
    elif kind == "i32":

        def read(w: Wave, operand: Operand) -> int:
            return signed32(w.scalar32(operand))

    else:
        return None

    def execute(w: Wave) -> None:
        w.scc = int(test(read(w, operands[0]), read(w, operands[1])))

    return execute


def arithmetic(name: str, operands: list[Operand]) -> Action | None:
    to, sources = operands[0], operands[1:]
    if name == "s_movk_i32":
        return lambda w: w.write_scalar32(to, signed16(sources[0].value))
    if name == "s_mov_b64":
        return lambda w: w.write_scalar64(to, w.scalar64(sources[0]))
    if name == "s_cselect_b32":
        return lambda w: w.write_scalar32(to, w.scalar32(sources[0 if w.scc else 1]))
    if name == "s_cselect_b64":
        return lambda w: w.write_scalar64(to, w.scalar64(sources[0 if w.scc else 1]))
    if name == "s_ff1_i32_b64":
        return lambda w: w.write_scalar32(to, first_one(w.scalar64(sources[0])))
    if name == "s_mulk_i32":
        return lambda w: w.write_scalar32(to, signed32(w.scalar32(to)) * signed16(sources[0].value))
    if function := SCC_UNTOUCHED.get(name):
        return lambda w: w.write_scalar32(to, function(*(w.scalar32(source) for source in sources)))
    if combine := SAVE_EXEC.get(name):

        def save_exec(w: Wave) -> None:
            argument, previous = w.scalar64(sources[0]), w.scalar[EXEC] | w.scalar[EXEC + 1] << 32
            w.write_scalar64(to, previous)
            result = combine(argument, previous) & MASK64
            w.set_exec(result)
            w.scc = int(result != 0)

        return save_exec
    if name in ("s_add_u32", "s_addc_u32", "s_sub_u32", "s_subb_u32"):
        sign, with_carry = (-1 if "sub" in name else 1), name in ("s_addc_u32", "s_subb_u32")

        def add_unsigned(w: Wave) -> None:
            result = w.scalar32(sources[0]) + sign * (w.scalar32(sources[1]) + (w.scc if with_carry else 0))
            w.scc = int(not 0 <= result <= MASK32)
            w.write_scalar32(to, result)

        return add_unsigned
    if name in ("s_add_i32", "s_sub_i32", "s_addk_i32"):
        sign = -1 if "sub" in name else 1

        def add_signed(w: Wave) -> None:
            if name == "s_addk_i32":
                result = signed32(w.scalar32(to)) + signed16(sources[0].value)
            else:
                result = signed32(w.scalar32(sources[0])) + sign * signed32(w.scalar32(sources[1]))
            w.scc = int(not -(1 << 31) <= result < 1 << 31)
            w.write_scalar32(to, result)

        return add_signed
    if name in ("s_min_i32", "s_max_i32", "s_min_u32", "s_max_u32"):
        convert = signed32 if name.endswith("i32") else int
        better = operator.lt if "min" in name else operator.gt

        def pick(w: Wave) -> None:
            first, second = (convert(w.scalar32(source)) for source in sources)
            w.scc = int(better(first, second))
            w.write_scalar32(to, first if w.scc else second)

        return pick
    return logic(name, to, sources)


def logic(name: str, to: Operand, sources: list[Operand]) -> Action | None:
    """Instructions whose SCC says whether the result is not 0."""
    if function := SCC_IF_NONZERO_32.get(name):

        def execute(w: Wave) -> None:
            result = function(*(w.scalar32(source) for source in sources)) & MASK32
            w.scc = int(result != 0)
            w.write_scalar32(to, result)

        return execute
    if name == "s_bcnt1_i32_b64":

        def count(w: Wave) -> None:
            result = w.scalar64(sources[0]).bit_count()
            w.scc = int(result != 0)
            w.write_scalar32(to, result)

        return count
    if name in SCC_IF_NONZERO_64 or name in SHIFTS_64:

        def execute64(w: Wave) -> None:
            if name in SHIFTS_64:
                result = SHIFTS_64[name](w.scalar64(sources[0]), w.scalar32(sources[1]) & 63)
            else:
                result = SCC_IF_NONZERO_64[name](*(w.scalar64(source) for source in sources))
            w.scc = int(result & MASK64 != 0)
            w.write_scalar64(to, result & MASK64)

        return execute64
    return None
