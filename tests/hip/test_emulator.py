"""The emulator itself: instructions against their definitions in plain Python, layouts, and each of its checks."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
from gfx9 import Emulator, EmulatorError, matrix, memory, scalar, vector
from gfx9.code_object import Instruction, Kernel
from gfx9.issue_cycles import cost
from gfx9.operands import Operand, parse
from gfx9.wave import EXEC, VCC, Wave

MASK = 0xFFFFFFFF
SOME_LANES = 0x8000_F00F_1234_0001


def f32(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def word(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.array(value, np.float32).view(np.uint32))


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def f16(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def f16_bits(value: float) -> int:
    return struct.unpack("<H", struct.pack("<e", value))[0]


def new_wave(shared_bytes: int = 512, lanes: int = 64, index: int = 0) -> Wave:
    return Wave(index, lanes, 0, memory.SharedMemory(shared_bytes))


def execute(wave: Wave, name: str, text: str, arch: str = "gfx942", mem: memory.GlobalMemory | None = None) -> object:
    texts, modifiers = parse(text)
    operands = [Operand(part) for part in texts]
    if name.startswith("v_mfma"):
        action = matrix.decode(name, operands, modifiers, arch)
    elif name.startswith("v_"):
        action = vector.decode(name, operands, modifiers)
    elif name.startswith(("ds_", "global_", "buffer_", "s_load")):
        action = memory.decode(name, operands, modifiers, mem or memory.GlobalMemory(1 << 16))
    else:
        action = scalar.decode(Instruction(0x100, 4, name, text, 5), operands)
    if action is None:
        raise EmulatorError(f"{name}: not modelled")
    try:
        with np.errstate(all="ignore"):
            return action(wave)
    finally:
        wave.wait(vmcnt=0, lgkmcnt=0)


# ---- vector ALU ------------------------------------------------------------------------------------------------------

INTEGERS: dict[str, Callable[..., int]] = {
    "v_mov_b32_e32": lambda a: a,
    "v_not_b32_e32": lambda a: ~a,
    "v_bfrev_b32_e32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_bcnt_u32_b32": lambda a, b: f"{a:b}".count("1") + b,
    "v_add_u32_e32": lambda a, b: a + b,
    "v_sub_u32_e32": lambda a, b: a - b,
    "v_subrev_u32_e32": lambda a, b: b - a,
    "v_and_b32_e32": lambda a, b: a & b,
    "v_or_b32_e32": lambda a, b: a | b,
    "v_xor_b32_e32": lambda a, b: a ^ b,
    "v_lshlrev_b32_e32": lambda a, b: b << a % 32,
    "v_lshrrev_b32_e32": lambda a, b: b >> a % 32,
    "v_ashrrev_i32_e32": lambda a, b: signed(b) >> a % 32,
    "v_lshlrev_b16_e32": lambda a, b: (b << a % 16) & 0xFFFF,
    "v_lshrrev_b16_e32": lambda a, b: (b & 0xFFFF) >> a % 16,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_u32_u24_e32": lambda a, b: a % 2**24 * (b % 2**24),
    "v_mul_i32_i24_e32": lambda a, b: signed(a << 8 & MASK) // 2**8 * (signed(b << 8 & MASK) // 2**8),
    "v_ffbh_u32_e32": lambda a: 32 - a.bit_length() if a else MASK,
    "v_ffbl_b32_e32": lambda a: (a & -a).bit_length() - 1,
    "v_min_i32_e32": lambda a, b: min(signed(a), signed(b)),
    "v_max_i32_e32": lambda a, b: max(signed(a), signed(b)),
    "v_min_u32_e32": min,
    "v_max_u32_e32": max,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << b % 32) + c,
    "v_add_lshl_u32": lambda a, b, c: ((a + b) & MASK) << c % 32,
    "v_lshl_or_b32": lambda a, b, c: (a << b % 32) | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_mad_u32_u24": lambda a, b, c: a % 2**24 * (b % 2**24) + c,
    "v_mad_i32_i24": lambda a, b, c: signed(a << 8 & MASK) // 2**8 * (signed(b << 8 & MASK) // 2**8) + c,
    "v_bfe_u32": lambda a, b, c: (a >> b % 32) % 2 ** (c % 32),
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_alignbit_b32": lambda a, b, c: ((a << 32) | b) >> c % 32,
    "v_pack_b32_f16": lambda a, b: (a & 0xFFFF) | (b << 16),
    "v_cvt_f32_u32_e32": lambda a: word(a),
    "v_cvt_f32_i32_e32": lambda a: word(signed(a)),
    "v_cvt_f32_f16_e32": lambda a: word(f16(a)),  # no NaN among the sources below
}

FLOATS: dict[str, Callable[..., float]] = {
    "v_add_f32_e32": lambda a, b: a + b,
    "v_sub_f32_e32": lambda a, b: a - b,
    "v_subrev_f32_e32": lambda a, b: b - a,
    "v_mul_f32_e32": lambda a, b: a * b,
    "v_max_f32_e32": max,
    "v_min_f32_e32": min,
    "v_max3_f32": max,
    "v_fma_f32": lambda a, b, c: a * b + c,
    "v_exp_f32_e32": lambda a: 2.0**a,
    "v_rcp_f32_e32": lambda a: 1 / a,
    "v_rcp_iflag_f32_e32": lambda a: 1 / a,
    "v_trunc_f32_e32": lambda a: math.copysign(math.trunc(a), a),
}


def arguments_of(function: Callable[..., object], name: str) -> int:
    return {min: 2, max: 3 if "max3" in name else 2}.get(function) or getattr(function, "__code__", None).co_argcount


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_instructions(name: str) -> None:
    function = INTEGERS[name]
    count = arguments_of(function, name)
    rng = random.Random(name)
    wave = new_wave()
    sources = [
        [rng.choice([0, 1, 31, 1 << 31, ~0x4000 & MASK, rng.getrandbits(32) & ~0x4000]) for _ in range(64)]
        for _ in range(count)
    ]
    for index, values in enumerate(sources):
        wave.vector[1 + index] = values
    wave.set_exec(SOME_LANES)
    before = wave.vector[0].copy()
    execute(wave, name, ", ".join(["v0", *(f"v{1 + index}" for index in range(count))]))
    for lane in range(64):
        active = SOME_LANES >> lane & 1
        expected = function(*(values[lane] for values in sources)) & MASK if active else before[lane]
        assert wave.vector[0][lane] == expected, lane


@pytest.mark.parametrize("name", FLOATS)
def test_float_instructions(name: str) -> None:
    function = FLOATS[name]
    count = arguments_of(function, name)
    rng = random.Random(name)
    wave = new_wave()
    sources = [[f32(word(rng.uniform(-9, 9))) for _ in range(64)] for _ in range(count)]
    for index, values in enumerate(sources):
        wave.vector[1 + index] = [word(value) for value in values]
    execute(wave, name, ", ".join(["v0", *(f"v{1 + index}" for index in range(count))]))
    for lane in range(64):
        assert wave.vector[0][lane] == word(function(*(values[lane] for values in sources))), lane


def test_source_modifiers_and_constants() -> None:
    wave = new_wave()
    wave.vector[1], wave.vector[2] = word(-3.0), word(2.0)
    wave.scalar[4] = word(5.0)
    execute(wave, "v_fma_f32", "v0, |v1|, -v2, s4")
    assert (wave.vector[0] == word(-1.0)).all()
    execute(wave, "v_add_f32_e32", "v0, 0.5, v2")
    assert (wave.vector[0] == word(2.5)).all()
    execute(wave, "v_add_u32_e32", "v0, -1, v2")
    assert (wave.vector[0] == word(2.0) - 1).all()
    execute(wave, "v_mov_b32_e32", "a3, v2")
    assert (wave.vector[256 + 3] == word(2.0)).all()


def test_packed_float() -> None:
    wave = new_wave()
    for register, value in enumerate([2.0, 3.0, 5.0, 7.0, 11.0, 13.0]):
        wave.vector[register] = word(value)
    execute(wave, "v_pk_fma_f32", "v[10:11], v[0:1], v[2:3], v[4:5]")
    assert [f32(int(wave.vector[r][0])) for r in (10, 11)] == [21.0, 34.0]
    # The low half of the second source for both results, and the third negated.
    execute(wave, "v_pk_fma_f32", "v[10:11], v[0:1], v[2:3], v[4:5] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]")
    assert [f32(int(wave.vector[r][0])) for r in (10, 11)] == [-1.0, 2.0]
    execute(wave, "v_pk_mul_f32", "v[0:1], v[0:1], v[2:3]")  # onto a source
    assert [f32(int(wave.vector[r][0])) for r in (0, 1)] == [10.0, 21.0]


def test_conversions() -> None:
    wave = new_wave()
    wave.vector[1], wave.vector[2] = word(1.00390625), word(-2.5)  # a tie in bf16: to even
    execute(wave, "v_cvt_pk_bf16_f32", "v0, v1, v2")
    assert wave.vector[0][0] == 0xC0203F80
    execute(wave, "v_cvt_pk_f16_f32", "v0, v1, v2")
    assert wave.vector[0][0] == f16_bits(-2.5) << 16 | f16_bits(1.00390625)
    execute(wave, "v_cvt_u32_f32_e32", "v0, v1")
    assert wave.vector[0][0] == 1
    execute(wave, "v_cvt_u32_f32_e32", "v0, v2")
    assert wave.vector[0][0] == 0


def test_sub_dword_selection() -> None:
    wave = new_wave()
    wave.vector[1], wave.vector[2] = 0x89ABCDEF, 0x000000FF
    execute(wave, "v_and_b32_sdwa", "v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:DWORD")
    assert wave.vector[0][0] == 0x89
    execute(wave, "v_or_b32_sdwa", "v0, v2, v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_0")
    assert wave.vector[0][0] == 0xCDFF0000
    text = "v0, sext(v1), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD"
    execute(wave, "v_or_b32_sdwa", text)
    assert wave.vector[0][0] == 0xFFFF89AB | 0x89ABCDEF
    wave.vector[3] = np.arange(64)
    execute(wave, "v_cmp_gt_u32_e32", "vcc, 1, v3")
    text = "v0, v1, v2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD"
    execute(wave, "v_cndmask_b32_sdwa", text)
    assert wave.vector[0][:2].tolist() == [0xFF, 0x89AB]


def test_bytes_and_truth_tables() -> None:
    wave = new_wave()
    wave.vector[1], wave.vector[2], wave.scalar[3] = 0x77665544, 0x33221100, 0x0C070401
    execute(wave, "v_perm_b32", "v0, v1, v2, s3")
    assert wave.vector[0][0] == 0x00774411
    wave.scalar[3] = 0x08
    with pytest.raises(EmulatorError, match="byte selector 8"):
        execute(wave, "v_perm_b32", "v0, v1, v2, s3")
    wave.vector[3] = 0x0F0F0F0F
    execute(wave, "v_bitop3_b32", "v0, v1, v2, v3 bitop3:0x6c")
    assert wave.vector[0][0] == (0x77665544 & 0x0F0F0F0F) ^ 0x33221100
    execute(wave, "v_bitop3_b16", "v0, v1, v2, v3 bitop3:0x6c")
    assert wave.vector[0][0] & 0xFFFF == (0x5544 & 0x0F0F) ^ 0x1100


def test_compares_write_active_lanes_only() -> None:
    wave = new_wave()
    wave.vector[1] = np.arange(64)
    wave.set_exec(SOME_LANES)
    execute(wave, "v_cmp_gt_u32_e32", "vcc, 20, v1")
    assert wave.scalar[VCC] | wave.scalar[VCC + 1] << 32 == SOME_LANES & (1 << 20) - 1
    execute(wave, "v_cndmask_b32_e64", "v2, 7, 9, vcc")
    assert wave.vector[2][0] == 9 and wave.vector[2][63] == 7
    wave.vector[3] = [word(math.nan), word(-math.inf), word(-0.0), word(1.0)] * 16
    wave.set_exec(0xF)
    for condition, expected in (("u", 0b0001), ("o", 0b1110), ("nlt", 0b1101), ("lt", 0b0010), ("neq", 0b1011)):
        execute(wave, f"v_cmp_{condition}_f32_e32", "vcc, v3, 0" if condition in "uo" else "vcc, v3, v4")
        wave.vector[4] = 0
        execute(wave, f"v_cmp_{condition}_f32_e32", "vcc, v3, v4")
        assert wave.scalar[VCC] == expected, condition
    wave.scalar[5] = 1 << 2 | 1 << 5 | 1 << 8  # -inf, -0, normal above 0
    execute(wave, "v_cmp_class_f32_e64", "vcc, v3, s5")
    assert wave.scalar[VCC] == 0b1110


def test_wide_arithmetic() -> None:
    wave = new_wave()
    a, b = 0x1_2345_6789, 0xFFFF_FFFF_0000_0001
    for register, value in ((2, a), (4, b)):
        wave.vector[register], wave.vector[register + 1] = value & MASK, value >> 32
    wave.vector[6] = 0xFFFF0000

    def result(register: int = 0) -> int:
        return int(wave.vector[register][9]) | int(wave.vector[register + 1][9]) << 32

    execute(wave, "v_lshl_add_u64", "v[0:1], v[2:3], 3, v[4:5]")
    assert result() == (a * 8 + b) % 2**64
    execute(wave, "v_lshlrev_b64", "v[0:1], 7, v[2:3]")
    assert result() == a << 7
    execute(wave, "v_mad_u64_u32", "v[0:1], vcc, v6, v6, v[4:5]")
    assert result() == (0xFFFF0000**2 + b) % 2**64 and wave.scalar[VCC] == MASK
    execute(wave, "v_mad_i64_i32", "v[0:1], vcc, v6, v6, v[4:5]")
    assert result() == (0x10000**2 + b) % 2**64 and wave.scalar[VCC] == 0
    execute(wave, "v_add_co_u32_e32", "v0, vcc, v2, v4")
    execute(wave, "v_addc_co_u32_e32", "v1, vcc, v3, v5, vcc")
    assert result() == (a + b) % 2**64
    execute(wave, "v_sub_co_u32_e32", "v0, vcc, v2, v4")
    execute(wave, "v_subb_co_u32_e32", "v1, vcc, v3, v5, vcc")
    assert result() == (a - b) % 2**64
    execute(wave, "v_cmp_lt_i64_e32", "vcc, v[4:5], v[2:3]")  # b is below 0 as a signed number
    assert wave.scalar[VCC] == MASK
    execute(wave, "v_cmp_lt_u64_e32", "vcc, v[4:5], v[2:3]")
    assert wave.scalar[VCC] == 0


def test_lanes() -> None:
    wave = new_wave()
    lanes = np.arange(64)
    wave.vector[1], wave.vector[2] = lanes, lanes + 100
    execute(wave, "v_permlane32_swap_b32_e32", "v1, v2")
    assert wave.vector[1].tolist() == [*range(32), *range(100, 132)]
    assert wave.vector[2].tolist() == [*range(32, 64), *range(132, 164)]
    wave.vector[1], wave.vector[2] = (lanes ^ 32) * 4, lanes
    execute(wave, "ds_bpermute_b32", "v0, v1, v2")
    assert wave.vector[0].tolist() == (lanes ^ 32).tolist()
    execute(wave, "v_mbcnt_lo_u32_b32", "v0, -1, 0")
    execute(wave, "v_mbcnt_hi_u32_b32", "v0, -1, v0")
    assert wave.vector[0].tolist() == lanes.tolist()
    wave.set_exec(1 << 17 | 1 << 40)
    execute(wave, "v_readfirstlane_b32", "s7, v2")
    assert wave.scalar[7] == 17
    execute(wave, "v_readlane_b32", "s7, v2, 5")
    assert wave.scalar[7] == 5
    execute(wave, "v_writelane_b32", "v3, s7, 9")
    assert wave.vector[3][9] == 5


# ---- scalar ALU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected", "scc"),
    [
        ("s_add_u32", "s0, s1, s2", (0xFFFFFFF0 + 0x20) & MASK, 1),
        ("s_addc_u32", "s0, s2, s3", 0x20 + 7 + 1, 0),
        ("s_sub_u32", "s0, s3, s2", (7 - 0x20) & MASK, 1),
        ("s_subb_u32", "s0, s2, s3", 0x20 - 7 - 1, 0),
        ("s_add_i32", "s0, s1, s2", 0x10, 0),
        ("s_add_i32", "s0, s4, s4", (2 * 0x7FFFFFFF) & MASK, 1),
        ("s_sub_i32", "s0, s3, s2", -25 & MASK, 0),
        ("s_mul_i32", "s0, s1, s3", -112 & MASK, 1),
        ("s_mul_hi_u32", "s0, s1, s3", 6, 1),
        ("s_min_i32", "s0, s1, s3", 0xFFFFFFF0, 1),
        ("s_min_u32", "s0, s1, s3", 7, 0),
        ("s_max_i32", "s0, s1, s3", 7, 0),
        ("s_and_b32", "s0, s1, s3", 0, 0),
        ("s_or_b32", "s0, s1, s3", 0xFFFFFFF7, 1),
        ("s_xor_b32", "s0, s1, s1", 0, 0),
        ("s_lshl_b32", "s0, s1, s3", 0xFFFFF800, 1),
        ("s_lshr_b32", "s0, s1, s3", 0x1FFFFFF, 1),
        ("s_ashr_i32", "s0, s1, s3", MASK, 1),
        ("s_bfe_u32", "s0, s1, 0x80004", 0xFF, 1),
        ("s_abs_i32", "s0, s1", 16, 1),
        ("s_brev_b32", "s0, s2", 1 << 26, 1),
        ("s_movk_i32", "s0, 0xfff0", 0xFFFFFFF0, 1),
        ("s_cselect_b32", "s0, s2, s3", 0x20, 1),
        ("s_ff1_i32_b64", "s0, s[2:3]", 5, 1),
        ("s_flbit_i32_b32", "s0, s2", 26, 1),
        ("s_bcnt1_i32_b64", "s0, s[2:3]", 4, 1),
    ],
)
def test_scalar_instructions(name: str, text: str, expected: int, scc: int) -> None:
    wave = new_wave()
    wave.scalar[1:5] = [0xFFFFFFF0, 0x20, 7, 0x7FFFFFFF]
    wave.scc = 1
    execute(wave, name, text)
    assert (wave.scalar[0], wave.scc) == (expected, scc)


def test_masks_and_branches() -> None:
    wave = new_wave()
    wave.scalar[2:4] = [0b110, 0]
    execute(wave, "s_and_saveexec_b64", "s[4:5], s[2:3]")
    assert wave.active.tolist() == [False, True, True] + [False] * 61 and wave.scalar[4:6] == [MASK, MASK]
    execute(wave, "s_andn2_b64", "exec, s[4:5], exec")
    assert wave.scalar[EXEC] == MASK & ~0b110 and wave.active.sum() == 62
    execute(wave, "s_cmp_lt_i32", "s2, 7")
    assert execute(wave, "s_cbranch_scc1", "5") == 0x104 + 20 and execute(wave, "s_cbranch_scc0", "5") is None
    execute(wave, "s_bitcmp1_b32", "s2, 0")
    assert wave.scc == 0
    execute(wave, "s_lshl_b64", "s[6:7], s[2:3], 40")
    assert wave.scalar[6:8] == [0, 0b110 << 8]


# ---- matrix ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "depth"),
    [("v_mfma_f32_32x32x8_f16", 32, 8), ("v_mfma_f32_32x32x16_f16", 32, 16), ("v_mfma_f32_16x16x16_f16", 16, 16)],
)
def test_matrix_layouts(name: str, size: int, depth: int) -> None:
    """Element by element from AMD's formulas: A[i][k] is in lane i + N (k / K), element k % K, of K elements a lane."""
    rng = random.Random(name)
    a, b = ([[rng.randrange(-4, 5) for _ in range(depth)] for _ in range(size)] for _ in range(2))
    wave = new_wave()
    per_lane = depth * size // 64
    for first, source in ((0, a), (8, b)):
        halves = np.zeros((64, per_lane), np.uint16)
        for row in range(size):
            for k in range(depth):
                halves[row + size * (k // per_lane), k % per_lane] = f16_bits(source[row][k])
        wave.vector[first : first + per_lane // 2] = halves.view(np.uint32).T
    count = size * size // 64
    wave.vector[32 : 32 + count] = word(0.5)
    last = per_lane // 2 - 1
    execute(wave, name, f"v[32:{31 + count}], v[0:{last}], v[8:{8 + last}], v[32:{31 + count}]")
    for row in range(size):
        for column in range(size):
            lane = column + size * (row // 4 % (64 // size))
            register = row % 4 + 4 * (row // 8) if size == 32 else row % 4
            expected = 0.5 + sum(x * y for x, y in zip(a[row], b[column], strict=True))
            assert f32(int(wave.vector[32 + register][lane])) == expected


def test_gfx90a_takes_subnormal_operands_as_zero() -> None:
    for arch, expected in (("gfx942", 8 * 2.0**-15), ("gfx90a", 0.0)):
        wave = new_wave()
        wave.vector[0:2], wave.vector[2:4] = f16_bits(2.0**-15) * 0x10001, f16_bits(1.0) * 0x10001
        execute(wave, "v_mfma_f32_32x32x8_f16", "v[8:23], v[0:1], v[2:3], 0", arch)
        assert f32(int(wave.vector[8][0])) == expected


# ---- memory ----------------------------------------------------------------------------------------------------------


def global_wave(values: np.ndarray) -> tuple[Wave, memory.GlobalMemory, int]:
    mem = memory.GlobalMemory(1 << 16)
    address = mem.upload(values)
    wave = new_wave()
    wave.scalar[2:4] = [address & MASK, address >> 32]
    wave.vector[1] = np.arange(64) * 4
    return wave, mem, address


def test_global_loads_and_stores() -> None:
    wave, mem, address = global_wave(np.arange(256, dtype=np.uint32))
    wave.set_exec(0x8000000000000001)
    before = wave.vector[8].copy()
    execute(wave, "global_load_dwordx2", "v[8:9], v1, s[2:3] offset:4", mem=mem)
    assert wave.vector[8][[0, 63]].tolist() == [1, 64] and wave.vector[9][[0, 63]].tolist() == [2, 65]
    assert (wave.vector[8][1:63] == before[1:63]).all()
    execute(wave, "global_store_short", "v1, v8, s[2:3] offset:514", mem=mem)
    assert mem.download(address, np.uint16, (512,))[[257, 257 + 126]].tolist() == [1, 64]
    execute(wave, "s_load_dwordx2", "s[4:5], s[2:3], 0x8", mem=mem)
    assert wave.scalar[4:6] == [2, 3]


@pytest.mark.parametrize("offset", [-4, 253 * 4, 1])
def test_global_access_is_checked(offset: int) -> None:
    wave, mem, _ = global_wave(np.arange(316, dtype=np.uint32))
    wave.vector[1] += np.uint32(4)
    with pytest.raises(EmulatorError, match="global access"):
        execute(wave, "global_load_dword", f"v8, v1, s[2:3] offset:{offset - 4 if offset < 0 else offset}", mem=mem)


def test_atomic_add_serves_lanes_one_by_one() -> None:
    wave, mem, address = global_wave(np.array([100], np.uint32))
    wave.vector[1], wave.vector[2] = 0, 3
    wave.set_exec(0b10011)
    execute(wave, "global_atomic_add", "v0, v1, v2, s[2:3] sc0", mem=mem)
    assert wave.vector[0][[0, 1, 4]].tolist() == [100, 103, 106]
    assert mem.download(address, np.uint32, (1,))[0] == 109


def test_buffer_loads_beyond_the_end_give_zero() -> None:
    wave, mem, address = global_wave(np.arange(1, 257, dtype=np.uint32))
    wave.scalar[4:8] = [address & MASK, address >> 32, 42 * 4, 0x00020000]
    wave.vector[1] = np.arange(64) * 16
    execute(wave, "buffer_load_dwordx4", "v[8:11], v1, s[4:7], 0 offen", mem=mem)
    got = wave.vector[8:12].T.reshape(-1)
    assert got[:42].tolist() == list(range(1, 43)) and (got[42:] == 0).all()


def test_shared_memory() -> None:
    wave = new_wave()
    lanes = np.arange(64)
    wave.vector[1], wave.vector[2], wave.vector[3] = lanes * 8, lanes, lanes + 500
    execute(wave, "ds_write_b64", "v1, v[2:3]")
    wave.vector[4] = lanes * 8 % 256
    execute(wave, "ds_read2_b64", "v[8:11], v4 offset0:1 offset1:2")
    assert wave.vector[8][3] == 4 and wave.vector[9][3] == 504 and wave.vector[10][3] == 5 and wave.vector[11][3] == 505
    wave.set_exec(0b111)
    wave.vector[4], wave.vector[5] = 0, 10
    execute(wave, "ds_add_u32", "v4, v5")
    execute(wave, "ds_read_b32", "v6, v4")
    assert wave.vector[6][0] == 30
    wave.vector[5] = -4 & MASK
    execute(wave, "ds_min_i32", "v4, v5")
    execute(wave, "ds_read_b32", "v6, v4")
    assert wave.vector[6][0] == -4 & MASK
    wave.vector[5] = 7
    execute(wave, "ds_max_i32", "v4, v5")
    execute(wave, "ds_read_b32", "v6, v4")
    assert wave.vector[6][0] == 7


@pytest.mark.parametrize(("address", "message"), [(508, "out of range"), (4, "not a multiple of 8")])
def test_shared_access_is_checked(address: int, message: str) -> None:
    wave = new_wave()
    wave.vector[1] = address
    with pytest.raises(EmulatorError, match=message):
        execute(wave, "ds_read_b64" if address == 4 else "ds_read_b96", "v[8:10], v1")


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        ("write", "read", True),
        ("read", "write", True),
        ("write", "write", True),
        ("read", "read", False),
        ("update", "read", True),
        ("read", "update", True),
        ("update", "write", True),
        ("write", "update", True),
        ("update", "update", False),
    ],
)
def test_races_between_waves(first: str, second: str, races: bool) -> None:
    shared = memory.SharedMemory(512)
    waves = [Wave(index, 64, 0, shared) for index in range(2)]
    instructions = {
        "write": ("ds_write_b32", "v1, v2"),
        "read": ("ds_read_b32", "v2, v1"),
        "update": ("ds_add_u32", "v1, v2"),
    }
    for wave in waves:
        wave.vector[1] = np.arange(64) * 4
    execute(waves[0], *instructions[first])
    execute(waves[0], *instructions[first])  # a wave does not race with itself
    if races:
        with pytest.raises(EmulatorError, match=f"race: a {second.upper()}"):
            execute(waves[1], *instructions[second])
    shared.pass_barrier(waves)
    execute(waves[1], *instructions[second])


# ---- waits -----------------------------------------------------------------------------------------------------------


class Listing:
    """In the place of a code object, a kernel of these lines. It finds the address of 16 bytes in s[0:1], its thread in
    v0, the address of a dword of its own and of one of the other wave in v1 and v2, and 0 in v3."""

    arch = "gfx942"

    def __init__(self, *lines: str) -> None:
        before = ("v_lshlrev_b32_e32 v1, 2, v0", "v_xor_b32_e32 v2, 0x100, v1", "v_mov_b32_e32 v3, 0")
        parts = [line.partition(" ") for line in (*before, *lines, "s_endpgm")]
        self.instructions = {4 * i: Instruction(4 * i, 4, name, text, 0) for i, (name, _, text) in enumerate(parts)}

    def kernel(self, name: str) -> Kernel:
        return Kernel(0, 512, 0, 16, 2, 0, (False, False, False))

    def run(self) -> None:
        for wave_order in range(3):
            Emulator(self, wave_order=wave_order).launch("listing", 1, 128, bytes(16))


@pytest.mark.parametrize(
    ("before", "behind"),
    [("ds_write_b32 v1, v0", "ds_read_b32 v4, v2"), ("ds_read_b32 v4, v1", "ds_write_b32 v2, v0")],
    ids=["write", "read"],
)
def test_what_a_barrier_separates_must_be_waited_for(before: str, behind: str) -> None:
    Listing(before, "s_waitcnt lgkmcnt(0)", "s_barrier", behind).run()
    Listing(before, "s_barrier", "s_waitcnt lgkmcnt(0)", "s_barrier", behind).run()
    for lines in (
        (before, "s_barrier", behind),
        (before, "s_waitcnt vmcnt(0)", "s_barrier", behind),
        (before, "s_waitcnt lgkmcnt(1)", "s_barrier", behind),
        (before, "s_barrier", "s_waitcnt lgkmcnt(0)", behind),
    ):
        with pytest.raises(EmulatorError, match="shared memory race"):
            Listing(*lines).run()


VECTOR = "global_load_dword v4, v3, s[0:1]"
SHARED = "ds_read2_b32 v[4:5], v3 offset1:1"
SCALAR = "s_load_dword s4, s[0:1], 0x0"


@pytest.mark.parametrize(
    ("lines", "fine"),
    [
        ([VECTOR, "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v5, v4"], True),
        ([VECTOR, "s_waitcnt vmcnt(1)", "v_mov_b32_e32 v5, v4"], False),
        ([VECTOR, "s_waitcnt lgkmcnt(0)", "v_mov_b32_e32 v5, v4"], False),
        ([VECTOR, "v_mov_b32_e32 v4, 0"], False),
        ([VECTOR, "v_pk_add_f32 v[6:7], v[4:5], v[4:5]"], False),
        ([VECTOR, "global_store_dword v3, v4, s[0:1]"], False),
        # In order, stores among them.
        ([VECTOR, "global_store_dword v3, v0, s[0:1]", "s_waitcnt vmcnt(1)", "v_mov_b32_e32 v5, v4"], True),
        (["global_atomic_add v4, v3, v3, s[0:1] sc0", "v_mov_b32_e32 v5, v4"], False),
        (["global_atomic_add v3, v3, s[0:1]", "v_mov_b32_e32 v5, v3"], True),
        ([VECTOR, VECTOR], True),
        ([VECTOR, SHARED], False),
        ([VECTOR, "s_waitcnt vmcnt(0)", SHARED], True),
        ([SHARED, "s_waitcnt lgkmcnt(0)", "v_mov_b32_e32 v6, v5"], True),
        ([SHARED, "v_mov_b32_e32 v6, v5"], False),
        ([SHARED, "ds_bpermute_b32 v6, v1, v2", "s_waitcnt lgkmcnt(1)", "v_mov_b32_e32 v7, v5"], True),
        ([SHARED, "ds_bpermute_b32 v6, v1, v2", "s_waitcnt lgkmcnt(1)", "v_mov_b32_e32 v7, v6"], False),
        ([SCALAR, "s_waitcnt lgkmcnt(0)", "s_mov_b32 s5, s4"], True),
        ([SCALAR, "s_mov_b32 s5, s4"], False),
        # In any order among each other and the others.
        ([SCALAR, "s_load_dword s6, s[0:1], 0x4", "s_waitcnt lgkmcnt(1)", "s_mov_b32 s5, s4"], False),
        ([SHARED, SCALAR, "s_waitcnt lgkmcnt(1)", "v_mov_b32_e32 v6, v5"], False),
    ],
)
def test_registers_must_be_waited_for(lines: list[str], fine: bool) -> None:
    kernel = Listing(*lines)
    if fine:
        kernel.run()
    else:
        with pytest.raises(EmulatorError, match="touches a register before the wait"):
            kernel.run()


# ---- what is not known -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("v_frobnicate_b32", "v0, v1"),
        ("v_add_f32_dpp", "v0, v1, v2 quad_perm:[0,1,2,3]"),
        ("v_add_f32_e64", "v0, v1, v2 clamp"),
        ("v_mfma_f32_32x32x8_f16", "v[8:23], v[0:1], v[2:3], 0 cbsz:1"),
        ("ds_read_u8_d16", "v0, v1"),
        ("global_load_dword", "v0, v1, s[2:3] something"),
        ("buffer_load_ubyte", "v0, v1, s[4:7], 0 offen"),
        ("s_frobnicate_b32", "s0, s1"),
        ("v_mov_b32_e32", "v0, src_private_base"),
    ],
)
def test_unknown_instructions_are_errors(name: str, text: str) -> None:
    with pytest.raises(EmulatorError, match="not modelled"):
        execute(new_wave(), name, text)


def test_issue_cycles() -> None:
    assert cost("v_mfma_f32_32x32x8_bf16", "gfx942") == ("mfma", 32)
    assert cost("v_mfma_f32_32x32x8bf16_1k", "gfx90a") == ("mfma", 64)
    assert cost("v_mfma_f32_32x32x16_bf16", "gfx950") == ("mfma", 32)
    assert cost("v_exp_f32_e32", "gfx942") == ("transcendental", 16)
    assert cost("v_pk_fma_f32", "gfx942") == ("valu", 4)
    assert cost("v_mul_lo_u32", "gfx942") == ("valu", 16)
    assert cost("s_add_u32", "gfx942") is None and cost("ds_read_b128", "gfx942") is None
