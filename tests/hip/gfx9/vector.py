"""Vector ALU instructions."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gfx9.errors import EmulatorError
from gfx9.operands import MASK32, Kind, Operand, bit_list
from gfx9.wave import LANE, LANES, UNINITIALISED, Action, Wave, as_float, as_words, bits_to_mask

U32, U64, F32, F64 = np.uint32, np.uint64, np.float32, np.float64
HALF = U32(0xFFFF)


def signed(words: np.ndarray) -> np.ndarray:
    return words.view(np.int32)


def wide(words: np.ndarray) -> np.ndarray:
    return words.astype(U64)


def shift(words: np.ndarray) -> np.ndarray:
    return words & U32(31)


def low24(words: np.ndarray) -> np.ndarray:
    return words & U32(0xFFFFFF)


def signed_low24(words: np.ndarray) -> np.ndarray:
    return (signed(words << U32(8)) >> 8).view(U32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once, but for products that need more than float64's 53 bits beside c."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F32)


def mad(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded twice."""
    return a * b + c


def permute_bytes(high: np.ndarray, low: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """v_perm_b32 with one selector for all lanes: bytes 0-3 pick from ``low``, 4-7 from ``high``, 12 is 0."""
    if selector.size != 1:
        raise EmulatorError("a selector per lane is not modelled")
    source = wide(high) << U64(32) | wide(low)
    result = np.zeros(LANES, U32)
    for byte, index in enumerate(int(selector[0]).to_bytes(4, "little")):
        if index > 7 and index != 12:
            raise EmulatorError(f"byte selector {index} is not modelled")
        if index <= 7:
            result |= (source >> U64(8 * index) & U64(0xFF)).astype(U32) << U32(8 * byte)
    return result


def lanes_below(mask: np.ndarray, base: np.ndarray, first: int) -> np.ndarray:
    """v_mbcnt: bits of the mask, which covers lanes [first, first + 32), that belong to lower lanes."""
    counts = [
        (int(bits) & (1 << min(max(lane - first, 0), 32)) - 1).bit_count()
        for lane, bits in zip(LANE, np.broadcast_to(mask, LANES), strict=True)
    ]
    return np.array(counts, U32) + base


def reverse_bits(words: np.ndarray) -> np.ndarray:
    return np.array([int(f"{int(word):032b}"[::-1], 2) for word in words], U32)


def count_bits(words: np.ndarray) -> np.ndarray:
    return np.array([int(word).bit_count() for word in words], U32)


def leading_zeros(words: np.ndarray) -> np.ndarray:
    """All bits set where the word is 0."""
    return np.array([32 - int(word).bit_length() if word else MASK32 for word in words], U32)


def trailing_zeros(words: np.ndarray) -> np.ndarray:
    """All bits set where the word is 0."""
    return np.array([(int(word) & -int(word)).bit_length() - 1 & MASK32 for word in words], U32)


def bf16_of(floats: np.ndarray) -> np.ndarray:
    words = as_words(floats)
    rounded = words + U32(0x7FFF) + (words >> U32(16) & U32(1)) >> U32(16)
    return np.where(np.isnan(floats), words >> U32(16) | U32(0x40), rounded)


def f16_of(floats: np.ndarray) -> np.ndarray:
    return floats.astype(np.float16).view(np.uint16).astype(U32)


def from_f16(words: np.ndarray) -> np.ndarray:
    return (words & HALF).astype(np.uint16).view(np.float16).astype(F32)


# Functions of 32-bit words.
INTEGER: dict[str, Callable[..., np.ndarray]] = {
    "mov_b32": lambda a: a,
    "accvgpr_read_b32": lambda a: a,
    "accvgpr_write_b32": lambda a: a,
    "not_b32": lambda a: ~a,
    "bfrev_b32": reverse_bits,
    "ffbh_u32": leading_zeros,
    "ffbl_b32": trailing_zeros,
    "bcnt_u32_b32": lambda a, b: count_bits(a) + b,
    "add_u32": lambda a, b: a + b,
    "sub_u32": lambda a, b: a - b,
    "subrev_u32": lambda a, b: b - a,
    "and_b32": lambda a, b: a & b,
    "or_b32": lambda a, b: a | b,
    "xor_b32": lambda a, b: a ^ b,
    "lshlrev_b32": lambda a, b: b << shift(a),
    "lshrrev_b32": lambda a, b: b >> shift(a),
    "ashrrev_i32": lambda a, b: (signed(b) >> signed(shift(a))).view(U32),
    "lshlrev_b16": lambda a, b: b << (a & U32(15)) & HALF,
    "lshrrev_b16": lambda a, b: (b & HALF) >> (a & U32(15)),
    "mul_lo_u32": lambda a, b: a * b,
    "mul_hi_u32": lambda a, b: (wide(a) * wide(b) >> U64(32)).astype(U32),
    "mul_u32_u24": lambda a, b: low24(a) * low24(b),
    "mul_i32_i24": lambda a, b: signed_low24(a) * signed_low24(b),
    "min_i32": lambda a, b: np.minimum(signed(a), signed(b)).view(U32),
    "max_i32": lambda a, b: np.maximum(signed(a), signed(b)).view(U32),
    "min_u32": np.minimum,
    "max_u32": np.maximum,
    "add3_u32": lambda a, b, c: a + b + c,
    "lshl_add_u32": lambda a, b, c: (a << shift(b)) + c,
    "add_lshl_u32": lambda a, b, c: a + b << shift(c),
    "lshl_or_b32": lambda a, b, c: a << shift(b) | c,
    "and_or_b32": lambda a, b, c: a & b | c,
    "or3_b32": lambda a, b, c: a | b | c,
    "xad_u32": lambda a, b, c: (a ^ b) + c,
    "mad_u32_u24": lambda a, b, c: low24(a) * low24(b) + c,
    "mad_i32_i24": lambda a, b, c: signed_low24(a) * signed_low24(b) + c,
    "bfe_u32": lambda a, b, c: a >> shift(b) & ((U32(1) << shift(c)) - U32(1)),
    "bfi_b32": lambda a, b, c: a & b | ~a & c,
    "perm_b32": permute_bytes,
    "alignbit_b32": lambda a, b, c: ((wide(a) << U64(32) | wide(b)) >> wide(shift(c))).astype(U32),
    "mbcnt_lo_u32_b32": lambda a, b: lanes_below(a, b, 0),
    "mbcnt_hi_u32_b32": lambda a, b: lanes_below(a, b, 32),
    "pack_b32_f16": lambda a, b: a & HALF | b << U32(16),
    "cvt_f32_u32": lambda a: as_words(a.astype(F32)),
    "cvt_f32_i32": lambda a: as_words(signed(a).astype(F32)),
    "cvt_f32_f16": lambda a: as_words(from_f16(a)),
}

# Functions of floats. Those of the transcendental unit are correctly rounded here.
FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "add_f32": lambda a, b: a + b,
    "sub_f32": lambda a, b: a - b,
    "subrev_f32": lambda a, b: b - a,
    "mul_f32": lambda a, b: a * b,
    "max_f32": np.fmax,
    "min_f32": np.fmin,
    "max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "fma_f32": fma,
    "fmaak_f32": fma,
    "fmamk_f32": fma,
    "madak_f32": mad,
    "madmk_f32": mad,
    "exp_f32": lambda a: np.exp2(a.astype(F64)).astype(F32),
    "log_f32": lambda a: np.log2(a.astype(F64)).astype(F32),
    "rcp_f32": lambda a: (1 / a.astype(F64)).astype(F32),
    "rcp_iflag_f32": lambda a: (1 / a.astype(F64)).astype(F32),
    "trunc_f32": np.trunc,
    # Of the division macro; v_div_scale_f32 below does not scale.
    "div_fmas_f32": fma,
    "div_fixup_f32": lambda quotient, b, a: (a.astype(F64) / b.astype(F64)).astype(F32),
}

# From floats to words.
FROM_FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "cvt_u32_f32": lambda a: np.clip(np.nan_to_num(a.astype(F64)), 0, MASK32).astype(U32),
    "cvt_f16_f32": f16_of,
    "cvt_pk_f16_f32": lambda a, b: f16_of(a) | f16_of(b) << U32(16),
    "cvt_pk_bf16_f32": lambda a, b: bf16_of(a) | bf16_of(b) << U32(16),
}

WIDE: dict[str, Callable[..., np.ndarray]] = {
    "mov_b64": lambda a: a,
    "lshlrev_b64": lambda a, b: b << (a & U64(63)),
    "lshrrev_b64": lambda a, b: b >> (a & U64(63)),
    "ashrrev_i64": lambda a, b: (b.view(np.int64) >> (a & U64(63)).view(np.int64)).view(U64),
    "lshl_add_u64": lambda a, b, c: (a << (b & U64(7))) + c,
}

PACKED: dict[str, Callable[..., np.ndarray]] = {
    "pk_add_f32": lambda a, b: a + b,
    "pk_mul_f32": lambda a, b: a * b,
    "pk_fma_f32": fma,
}

COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": np.not_equal,
    "neq": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}


def decode(name: str, operands: list[Operand], modifiers: dict[str, str]) -> Action | None:
    encoding = re.search(r"_(e32|e64|sdwa|dpp)$", name)
    base = name.removeprefix("v_").removesuffix(encoding[0] if encoding else "")
    if name.endswith("_sdwa"):
        return sub_dword(base, operands, modifiers)
    if base.startswith("pk_"):
        return packed(base, operands, modifiers)
    if base in ("bitop3_b32", "bitop3_b16") and set(modifiers) <= {"bitop3"}:
        return truth_table(operands, int(modifiers.get("bitop3", "0"), 0), 32 if base.endswith("32") else 16)
    if modifiers or name.endswith("_dpp"):
        return None
    return plain(base, operands)


def plain(base: str, operands: list[Operand]) -> Action | None:
    if base == "nop":
        return lambda w: None
    to, sources = operands[0], operands[1:]
    if base.startswith("cmp_"):
        return compare(base, to, sources)
    if function := INTEGER.get(base):
        if any(source.negate or source.absolute for source in sources):
            return None
        return lambda w: w.write(to.index, function(*(w.words(source) for source in sources)))
    if function := FLOAT.get(base):
        return lambda w: w.write(to.index, as_words(function(*(w.floats(source) for source in sources))))
    if function := FROM_FLOAT.get(base):
        return lambda w: w.write(to.index, function(*(w.floats(source) for source in sources)))
    if function := WIDE.get(base):
        return lambda w: w.write64(to.index, function(*(w.words64(source) for source in sources)))
    if base in ("fmac_f32", "mac_f32"):
        combine = fma if base == "fmac_f32" else mad
        return lambda w: w.write(
            to.index, as_words(combine(w.floats(sources[0]), w.floats(sources[1]), as_float(w.vector[to.index])))
        )
    if base == "ldexp_f32":
        return lambda w: w.write(to.index, as_words(np.ldexp(w.floats(sources[0]), signed(w.words(sources[1])))))
    if base == "cndmask_b32":
        return select(to, sources)
    if re.fullmatch(r"(add|sub|subrev|addc|subb|subbrev)_co_u32", base):
        return add_with_carry(base, to, sources)
    if base in ("mad_u64_u32", "mad_i64_i32", "div_scale_f32"):
        return with_mask_result(base, to, sources)
    return across_lanes(base, to, sources)


def with_mask_result(base: str, to: Operand, sources: list[Operand]) -> Action:
    """Instructions whose second operand is a mask that they write."""
    mask, sources = sources[0], sources[1:]

    def multiply_add(w: Wave) -> None:
        addend = w.words64(sources[2])
        result = np.broadcast_to(wide(w.words(sources[0])) * wide(w.words(sources[1])) + addend, LANES)
        w.write64(to.index, result)
        w.write_mask(mask, result < addend)

    def multiply_add_signed(w: Wave) -> None:
        addend = w.words64(sources[2]).view(np.int64)
        product = signed(w.words(sources[0])).astype(np.int64) * signed(w.words(sources[1])).astype(np.int64)
        result = np.broadcast_to(product + addend, LANES)
        w.write64(to.index, result.view(U64))
        w.write_mask(mask, (result < addend) != (product < 0))

    def division_scale(w: Wave) -> None:
        w.write(to.index, as_words(w.floats(sources[0])))
        w.write_scalar64(mask, 0)

    return {"mad_u64_u32": multiply_add, "mad_i64_i32": multiply_add_signed}.get(base, division_scale)


def select(to: Operand, sources: list[Operand]) -> Action:
    def read(w: Wave, source: Operand) -> np.ndarray:
        return as_words(w.floats(source)) if source.negate or source.absolute else w.words(source)

    def execute(w: Wave) -> None:
        condition = bits_to_mask(w.scalar64(sources[2]))
        w.write(to.index, np.where(condition, read(w, sources[1]), read(w, sources[0])))

    return execute


def compare(base: str, to: Operand, sources: list[Operand]) -> Action | None:
    if base == "cmp_class_f32":
        return classify(to, sources)
    relation, _, kind = base.removeprefix("cmp_").partition("_")
    test = COMPARISONS.get(relation)
    readers: dict[str, Callable[[Wave, Operand], np.ndarray]] = {
        "f32": Wave.floats,
        "u32": Wave.words,
        "i32": lambda w, source: signed(w.words(source)),
        "u64": Wave.words64,
        "i64": lambda w, source: w.words64(source).view(np.int64),
        "u16": lambda w, source: w.words(source) & HALF,
    }
    if test is None or kind not in readers:
        return None
    read = readers[kind]
    return lambda w: w.write_mask(to, test(read(w, sources[0]), read(w, sources[1])))


def classify(to: Operand, sources: list[Operand]) -> Action:
    """v_cmp_class_f32; classes: 2 -inf, 3 -normal, 4 -subnormal, 5 -0, 6 +0, 7 subnormal, 8 normal, 9 inf; 0, 1 NaN."""

    def execute(w: Wave) -> None:
        value, wanted = np.broadcast_to(w.floats(sources[0]), LANES), w.lanes(sources[1])
        if (wanted & U32(3)).any():
            raise EmulatorError("the classes of NaN are not modelled")
        size = np.abs(value)
        rank = np.select([np.isinf(size), size >= F32(2.0**-126), size > 0], [0, 1, 2], 3)
        index = np.where(np.signbit(value), 2 + rank, 9 - rank)
        w.write_mask(to, (wanted >> index.astype(U32) & U32(1)).astype(bool) & ~np.isnan(value))

    return execute


def add_with_carry(base: str, to: Operand, sources: list[Operand]) -> Action:
    subtract, carry_in = base.startswith("sub"), base.startswith(("addc", "subb"))
    reverse = "rev" in base

    def execute(w: Wave) -> None:
        a, b = w.words(sources[1]).astype(np.int64), w.words(sources[2]).astype(np.int64)
        a, b = (b, a) if reverse else (a, b)
        carry = bits_to_mask(w.scalar64(sources[3])).astype(np.int64) if carry_in else 0
        result = np.broadcast_to(a - b - carry if subtract else a + b + carry, LANES)
        w.write(to.index, (result & MASK32).astype(U32))
        w.write_mask(sources[0], (result < 0) | (result > MASK32))

    return execute


def across_lanes(base: str, to: Operand, sources: list[Operand]) -> Action | None:
    if base == "readfirstlane_b32":
        return lambda w: w.write_scalar32(to, int(w.lanes(sources[0])[int(np.argmax(w.active))]))
    if base == "readlane_b32":
        return lambda w: w.write_scalar32(to, int(w.vector[sources[0].index, w.scalar32(sources[1]) & 63]))
    if base == "writelane_b32":

        def write_lane(w: Wave) -> None:
            w.vector[to.index, w.scalar32(sources[1]) & 63] = w.scalar32(sources[0])

        return write_lane
    if base == "permlane32_swap_b32":
        first, second = to.index, sources[0].index

        def swap_halves(w: Wave) -> None:
            if not w.all_active:
                raise EmulatorError("a swap among some lanes only is not modelled")
            upper, lower = w.vector[first, 32:].copy(), w.vector[second, :32].copy()
            w.vector[first, 32:], w.vector[second, :32] = lower, upper

        return swap_halves
    return None


def truth_table(operands: list[Operand], table: int, width: int) -> Action:
    """v_bitop3: bit 4 a + 2 b + c of the table is the result for bits a, b, c.

    What the upper half of a 16-bit result holds is not documented: here it is spoilt, so that its use shows.
    """
    to, sources = operands[0], operands[1:]

    def execute(w: Wave) -> None:
        a, b, c = (w.words(source) for source in sources)
        result = np.zeros(LANES, U32)
        for index in range(8):
            if table >> index & 1:
                result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        w.write(to.index, result if width == 32 else result & HALF | U32(UNINITIALISED & ~0xFFFF))

    return execute


def packed(base: str, operands: list[Operand], modifiers: dict[str, str]) -> Action | None:
    """Two results of 32 bits; op_sel and op_sel_hi say which half of each source makes the first and the second."""
    to, sources = operands[0], operands[1:]
    if set(modifiers) - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}:
        return None
    count = len(sources)
    halves = [bit_list(modifiers, "op_sel", 0, count), bit_list(modifiers, "op_sel_hi", 1, count)]
    negations = [bit_list(modifiers, "neg_lo", 0, count), bit_list(modifiers, "neg_hi", 0, count)]

    def half(source: Operand, part: int) -> int:
        return 0 if source.kind is Kind.CONSTANT else part  # a constant is the same for both

    if base == "pk_mov_b32":
        constants = all(source.kind is Kind.CONSTANT for source in sources)
        if "op_sel" not in modifiers and not constants:
            return None

        def move(w: Wave) -> None:
            # The low result is a half of the first source, the high one a half of the second.
            values = [w.words(source, half(source, halves[0][i])).copy() for i, source in enumerate(sources)]
            w.write(to.index, values[0])
            w.write(to.index + 1, values[1])

        return move
    function = PACKED.get(base)
    if function is None:
        return None

    def read(w: Wave, source: Operand, part: int, negate: int) -> np.ndarray:
        value = as_float(w.words(source, half(source, part)))
        return -value if negate else value

    def execute(w: Wave) -> None:
        results = [
            function(*(read(w, source, halves[k][i], negations[k][i]) for i, source in enumerate(sources)))
            for k in range(2)
        ]
        for k, result in enumerate(results):
            w.write(to.index + k, as_words(result))

    return execute


def sub_dword(base: str, operands: list[Operand], modifiers: dict[str, str]) -> Action | None:
    """SDWA: sources are bytes or halves of registers, and so is the result; the rest of it is 0."""
    if set(modifiers) - {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}:
        return None
    if modifiers.get("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        return None
    to, sources = operands[0], operands[1:]
    selected = [modifiers.get(f"src{i}_sel", "DWORD") for i in range(len(sources))]

    def bits_of(selection: str) -> tuple[int, int]:
        kind, _, index = selection.partition("_")
        width = {"BYTE": 8, "WORD": 16, "DWORD": 32}[kind]
        return width, width * int(index or 0)

    def read(w: Wave, i: int) -> np.ndarray:
        width, first = bits_of(selected[i])
        if sources[i].sign_extend:
            return (signed(w.words(sources[i]) << U32(32 - width - first)) >> (32 - width)).view(U32)
        return w.words(sources[i]) >> U32(first) & U32((1 << width) - 1)

    if base.startswith("cmp_"):
        relation, _, kind = base.removeprefix("cmp_").partition("_")
        if kind not in ("u16", "u32"):
            return None
        return lambda w: w.write_mask(to, COMPARISONS[relation](read(w, 0), read(w, 1)))
    function = INTEGER.get(base)
    if function is None and base != "cndmask_b32":
        return None
    width, first = bits_of(modifiers.get("dst_sel", "DWORD"))

    def execute(w: Wave) -> None:
        if function is None:
            result = np.where(bits_to_mask(w.scalar64(sources[2])), read(w, 1), read(w, 0))
        else:
            result = function(*(read(w, i) for i in range(len(sources))))
        w.write(to.index, (result & U32((1 << width) - 1)) << U32(first))

    return execute
