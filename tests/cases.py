"""One table of ragged shapes, shared by the tests and the benchmarks.

Ids like A04 refer to faults that users of such kernels reported elsewhere; ``notes`` says what each shape is for, and
what was scaled down so that a CPU checks it against the float64 oracle in well under a second.
"""

from __future__ import annotations

from dataclasses import dataclass

MLA = (128, 64, 128)  # (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) of DeepSeek V2/V3/R1, Kimi K2
SMALL = (16, 8, 16)  # where only the lengths matter and the sequences are long
HEAD_DIMS = {
    "deepseek": MLA,
    "glm": (192, 64, 256),
    "even": (64, 64, 128),
    "no_rope": (256, 0, 256),
}


@dataclass(frozen=True)
class Case:
    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int
    causal: bool
    head_dims: tuple[int, int, int] = MLA
    notes: str = ""

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.kv_lens):
            raise ValueError(f"{self.name}: expected as many kv_lens as q_lens, got {self.kv_lens} and {self.q_lens}")

    @property
    def qk_head_dim(self) -> int:
        nope, rope, _ = self.head_dims
        return nope + rope

    @property
    def pairs(self) -> int:
        """Query rows times keys, over all sequences: what the work of one head grows with."""
        return sum(len_q * len_k for len_q, len_k in zip(self.q_lens, self.kv_lens, strict=True))

    def __str__(self) -> str:
        return self.name


def both_masks(name: str, *args: object, **kwargs: object) -> tuple[Case, Case]:
    return tuple(Case(f"{name}_{'causal' if causal else 'full'}", *args, causal, **kwargs) for causal in (True, False))


CASES: tuple[Case, ...] = (
    *both_masks("A01_no_keys", (5, 3, 1), (0, 7, 0), 3, notes="Lq > 0 with Lk = 0, beside a sequence with keys"),
    *both_masks("A01_never_any_key", (4, 2), (0, 0), 2, notes="Tk = 0: no sequence has a key"),
    Case(
        "A02_second_chunk",
        (64, 64),
        (1024, 0),
        2,
        False,
        notes="the second context chunk has nothing for request 2; the report had cu_k = [0, 8192, 8192]",
    ),
    Case("A03_empty_entry_in_varlen", (7, 33, 2), (129, 0, 65), 12, False, notes="H = 12, 192/128, full mask"),
    *both_masks(
        "A04_empty_at_the_ends",
        (0, 151, 105, 0),
        (317, 218, 105, 384),
        2,
        notes="an eighth of cu_q = [0, 0, 1208, 2048, 2048], cu_k = [0, 2538, 4280, 5120, 8192]",
    ),
    *both_masks(
        "A04_exact_lengths", (0, 1208, 840, 0), (2538, 1742, 840, 3072), 1, head_dims=SMALL, notes="small head dims"
    ),
    Case(
        "A06_chunk_without_keys_for_some",
        (1, 9, 3, 0, 17, 2, 1, 5, 4, 4, 1, 1, 8, 30, 2, 6, 1, 2, 3, 1, 7, 1, 1, 12, 2, 3, 1, 1, 5, 6, 2, 1),
        (64, 0, 64, 64, 0, 0, 33, 64, 0, 1, 64, 0, 64, 64, 0, 7, 0, 64, 0, 0, 64, 64, 2, 0, 64, 0, 64, 5, 0, 64, 0, 64),
        2,
        False,
        notes="32 requests, cu_k entries equal for some",
    ),
    Case("A07_cached_prefix", (2,), (5,), 2, True, notes="row 0 sees 4 keys, row 1 five"),
    *both_masks("A08_more_rows_than_keys", (9, 5, 40), (4, 5, 1), 2, notes="causal: the first Lq - Lk rows are empty"),
    Case(
        "A09_unequal_requests",
        (159, 162, 168, 160, 163, 168, 44),
        (159, 162, 168, 160, 163, 168, 44),
        2,
        True,
        notes="an eighth of cu = [0, 1274, 2568, 3915, 5194, 6498, 7839, 8192]",
    ),
    Case(
        "A09_exact_lengths",
        (1274, 1294, 1347, 1279, 1304, 1341, 353),
        (1274, 1294, 1347, 1279, 1304, 1341, 353),
        1,
        True,
        SMALL,
        notes="small head dims",
    ),
    Case(
        "A14_one_row_each",
        (1,) * 12,
        (95, 190, 161, 33, 1, 255, 256, 257, 300, 96, 97, 128),
        16,
        False,
        notes="12 requests of Lq = 1; the report had H = 128 and 15.5k keys",
    ),
    Case("A18_heads_unlike_tokens", (100, 151), (100, 151), 5, True, notes="5 heads per rank, 251 tokens, exact"),
    Case(
        "A30_realistic_length",
        (96, 300),
        (4096, 1500),
        1,
        True,
        notes="short prompts can take another path than long ones",
    ),
    *both_masks("one_row_one_key", (1,), (1,), 1),
    *both_masks(
        "tile_edges",
        (1, 15, 16, 17, 31, 32, 33, 63, 64, 65),
        (1, 95, 96, 97, 127, 128, 129, 191, 192, 193),
        2,
        notes="one below, at and one above what kernels tile by",
    ),
    *both_masks("query_tile_edges", (127, 128, 129, 255, 256, 257), (64, 128, 33, 256, 255, 300), 1),
    *both_masks("many_short", tuple(1 + i % 11 for i in range(48)), tuple(i * 7 % 23 for i in range(48)), 4),
    *both_masks("chunked_prefill", (128, 1, 1, 64), (896, 513, 40, 64), 2, notes="new tokens behind cached ones"),
    *(
        Case(f"A17_{heads}_heads", (3, 40, 0, 17), (35, 40, 9, 120), heads, True, notes="heads per rank not 16 n")
        for heads in (1, 4, 5, 8, 11, 12, 20)
    ),
    *(
        case
        for name, dims in HEAD_DIMS.items()
        if dims != MLA
        for case in both_masks(f"dims_{name}", (33, 5, 64), (70, 5, 200), 3, head_dims=dims)
    ),
    *(
        Case(f"odd_dims_{'_'.join(map(str, dims))}", (9, 0, 33), (20, 3, 101), 3, True, dims, notes="CPU only")
        for dims in ((1, 0, 1), (7, 3, 5), (15, 1, 17), (40, 24, 33), (128, 64, 1), (1, 1, 129))
    ),
)
