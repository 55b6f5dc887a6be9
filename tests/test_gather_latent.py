"""gather_latent against indexing done token by token, and against cache rows packed here byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    FP8,
    INF,
    LAYOUTS,
    NAN,
    assert_same_bits,
    cu_seqlens,
    embed,
    int32,
    place,
    skip_without_kernel,
    skip_without_memory,
)

import mla_prefill

WIDTH = 576  # 512 latent + 64 rope
BLOCK_SIZES = pytest.mark.parametrize("block_size", [1, 3, 16, 64])
PLAIN = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def device(device: str) -> str:
    skip_without_kernel("gather_latent", device)
    return device


@dataclass
class Paged:
    """Requests whose tokens lie in shuffled blocks; ``rows`` says which cache row each output row must be."""

    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    num_blocks: int
    rows: torch.Tensor  # [tokens] flat slot, -1 for a token outside its row of the block table

    def kwargs(self) -> dict[str, torch.Tensor]:
        return {"block_table": self.block_table, "cu_seqlens": self.cu_seqlens, "starts": self.starts}


def paged(
    block_size: int,
    device: str = "cpu",
    starts: Sequence[int] = (0, 5, 70, 17),
    lens: Sequence[int] = (130, 0, 33, 64),
    max_blocks: int | None = None,
    first_row: int = 0,
) -> Paged:
    needed = max((start + length + block_size - 1) // block_size for start, length in zip(starts, lens, strict=True))
    max_blocks = needed if max_blocks is None else max_blocks
    num_blocks = len(lens) * max_blocks + 3
    generator = torch.Generator().manual_seed(block_size)
    ids = torch.randperm(num_blocks, generator=generator)[: len(lens) * max_blocks]
    table = ids.to(torch.int32).reshape(len(lens), max_blocks)
    rows = [-1] * first_row
    for request, (start, length) in enumerate(zip(starts, lens, strict=True)):
        for position in range(start, start + length):
            block = position // block_size
            inside = block < max_blocks
            rows.append(int(table[request, block]) * block_size + position % block_size if inside else -1)
    return Paged(
        columns_of_a_wider_table(table.to(device)),
        cu_seqlens(lens, device, first_row),
        int32(starts, device),
        num_blocks,
        torch.tensor(rows, device=device),
    )


def columns_of_a_wider_table(table: torch.Tensor) -> torch.Tensor:
    """The other columns hold block ids that exist, so that reading them would go unpunished but for the result."""
    wide = torch.nn.functional.pad(table, (1, 2))
    return wide[:, 1:-2]


def expected_rows(flat: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """flat: the dequantized cache as [slots, width]."""
    picked = flat[rows.clamp(min=0)]
    return torch.where((rows >= 0).unsqueeze(1), picked, torch.zeros_like(picked))


def random_cache(num_blocks: int, block_size: int, dtype: torch.dtype, device: str, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_blocks)
    return torch.randn(num_blocks, block_size, width, generator=generator).to(dtype).to(device)


# ---- unquantised -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
@BLOCK_SIZES
def test_plain_cache_with_any_strides(block_size: int, dtype: torch.dtype, layout: str, device: str) -> None:
    """Unaligned starts; NaN lies between the cache's rows."""
    table = paged(block_size, device)
    cache = random_cache(table.num_blocks, block_size, dtype, device)
    out = mla_prefill.gather_latent(place(cache, layout), **table.kwargs())
    assert out.dtype == dtype and out.shape == (227, WIDTH)
    assert_same_bits(out, expected_rows(cache.flatten(0, 1), table.rows))


@pytest.mark.parametrize("k_scale", [0.5, torch.tensor(0.5)], ids=["float", "tensor"])
def test_A21_no_scale_is_applied_to_an_unquantised_cache(k_scale: object, dtype: torch.dtype, device: str) -> None:
    table = paged(16, device)
    cache = random_cache(table.num_blocks, 16, dtype, device)
    k_scale = k_scale.to(device) if isinstance(k_scale, torch.Tensor) else k_scale
    out = mla_prefill.gather_latent(cache, **table.kwargs(), k_scale=k_scale)
    assert_same_bits(out, expected_rows(cache.flatten(0, 1), table.rows))


@pytest.mark.parametrize("width", [1, 7, 512, 576, 656])
def test_any_width_of_a_plain_cache(width: int, dtype: torch.dtype, device: str) -> None:
    table = paged(16, device)
    cache = random_cache(table.num_blocks, 16, dtype, device, width)
    out = mla_prefill.gather_latent(cache, **table.kwargs(), layout="plain")
    assert_same_bits(out, expected_rows(cache.flatten(0, 1), table.rows))


@pytest.mark.parametrize("first_row", [0, 3])
@pytest.mark.parametrize("batch", [1, 8, 9, 10, 81, 82, 700])
def test_many_requests(batch: int, first_row: int, device: str) -> None:
    """Empty ones at the ends and in a row among them."""
    lens = [(5 * i + 1) % 7 if i % 11 < 8 else 0 for i in range(batch)]
    table = paged(4, device, [(3 * i) % 10 for i in range(batch)], lens, first_row=first_row)
    cache = random_cache(table.num_blocks, 4, torch.bfloat16, device, 64)
    out = torch.full((sum(lens) + first_row + 2, 64), 5.0, dtype=torch.bfloat16, device=device)
    mla_prefill.gather_latent(cache, **table.kwargs(), out=out)
    assert_same_bits(out[first_row:-2], expected_rows(cache.flatten(0, 1), table.rows[first_row:]))
    assert (out[:first_row] == 5).all() and (out[-2:] == 5).all()


# ---- where there is nothing to gather --------------------------------------------------------------------------------


def test_A23_positions_past_the_row_of_the_block_table(dtype: torch.dtype, device: str) -> None:
    """The reported block_table [1, 2], block 64, starts [128], cu [0, 65]: every token is past the row."""
    tables = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    cache = torch.full((6, 64, WIDTH), 7.0, dtype=dtype, device=device)
    out = mla_prefill.gather_latent(cache, tables[:1], int32([0, 65], device), int32([128], device))
    assert out.shape == (65, WIDTH) and (out == 0).all()


@BLOCK_SIZES
def test_A23_a_request_that_runs_over_the_end_of_its_row(block_size: int, dtype: torch.dtype, device: str) -> None:
    table = paged(block_size, device, starts=(60, 0), lens=(100, 50), max_blocks=-(-100 // block_size))
    cache = random_cache(table.num_blocks, block_size, dtype, device)
    out = mla_prefill.gather_latent(cache, **table.kwargs())
    assert (table.rows < 0).any() and (table.rows >= 0).any()
    assert_same_bits(out, expected_rows(cache.flatten(0, 1), table.rows))


@pytest.mark.parametrize("start", [2**31 - 1, 2**31 - 64, 10**9])
def test_A23_positions_that_overflow_32_bits(start: int, device: str) -> None:
    cache = torch.full((4, 64, WIDTH), 7.0, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 3, dtype=torch.int32, device=device)
    out = mla_prefill.gather_latent(cache, table, int32([0, 200], device), int32([start], device))
    assert (out == 0).all()


@pytest.mark.parametrize("bad_id", [-1, 6, 2**31 - 1, -(2**31)])
def test_block_ids_outside_the_cache_give_zeros(bad_id: int, dtype: torch.dtype, device: str) -> None:
    """-1 is how several engines pad a block table."""
    cache = torch.full((8, 4, WIDTH), NAN, dtype=dtype, device=device)
    cache[1:7] = 7.0
    table = int32([0, bad_id, 5], device).reshape(1, 3)
    out = mla_prefill.gather_latent(cache[1:7], table, int32([0, 12], device), int32([0], device))
    assert (out[:4] == 7).all() and (out[4:8] == 0).all() and (out[8:] == 7).all()


@pytest.mark.parametrize(("starts", "lens"), [((), ()), ((0,), (0,)), ((3, 9), (0, 0))], ids=str)
def test_A28_nothing_to_gather(starts: tuple, lens: tuple, dtype: torch.dtype, device: str) -> None:
    cache = random_cache(2, 16, dtype, device)
    table = torch.zeros(len(lens), 4, dtype=torch.int32, device=device)
    out = mla_prefill.gather_latent(cache, table, cu_seqlens(lens, device), int32(starts, device))
    assert out.shape == (0, WIDTH) and out.dtype == dtype


def test_empty_cache_and_empty_table_give_zeros(dtype: torch.dtype, device: str) -> None:
    for blocks, columns in ((0, 2), (3, 0)):
        cache = torch.empty(blocks, 16, WIDTH, dtype=dtype, device=device)
        table = torch.zeros(1, columns, dtype=torch.int32, device=device)
        out = mla_prefill.gather_latent(cache, table, int32([0, 20], device), int32([0], device))
        assert out.shape == (20, WIDTH) and (out == 0).all()


@pytest.mark.gpu
def test_cache_offsets_past_32_bits_on_a_gpu() -> None:
    skip_without_memory("cuda", 12 * 2**30)
    block, width = 2**31 + 8, WIDTH
    cache = torch.empty(2 * block + 4 * width, dtype=torch.bfloat16, device="cuda").as_strided(
        (3, 4, width), (block, width, 1)
    )
    values = random_cache(3, 4, torch.bfloat16, "cuda")
    cache.copy_(values)
    table = int32([2, 0, 1], "cuda").reshape(1, 3)
    out = mla_prefill.gather_latent(cache, table, int32([0, 11], "cuda"), int32([1], "cuda"))
    assert_same_bits(out, values[[2, 0, 1]].flatten(0, 1)[1:])


# ---- the caller's output ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "odd_offset", "sliced"])
def test_given_output(layout: str, dtype: torch.dtype, device: str) -> None:
    """Strided, with rows before cu[0] and past cu[-1], which are left alone, as is what lies between the rows."""
    table = paged(16, device, first_row=2)
    cache = random_cache(table.num_blocks, 16, dtype, device)
    out = embed((235, WIDTH), dtype, device, layout=layout)
    out.view.fill_(NAN)
    result = mla_prefill.gather_latent(cache, **table.kwargs(), out=out.view)
    assert result is out.view
    out.assert_rest_untouched()
    assert result[:2].isnan().all() and result[229:].isnan().all()
    assert_same_bits(result[2:229], expected_rows(cache.flatten(0, 1), table.rows[2:]))


def test_output_with_too_few_rows_is_refused(device: str) -> None:
    table = paged(16)
    cache = random_cache(table.num_blocks, 16, torch.bfloat16, "cpu")
    out = torch.full((226, WIDTH), 7.0, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"cu_seqlens: expected .*226.*out.*, got 227"):
        mla_prefill.gather_latent(cache, **table.kwargs(), out=out)
    assert (out == 7).all()


# ---- float8 e4m3 with one scale --------------------------------------------------------------------------------------


def fp8_cache(num_blocks: int, block_size: int, device: str) -> torch.Tensor:
    return (10 * random_cache(num_blocks, block_size, torch.float32, "cpu")).to(FP8).to(device)


SCALES = {
    "float": 0.0123,
    "0-dim": torch.tensor(0.0123),
    "one": torch.tensor([0.0123]),
    "none": None,
}


@pytest.mark.parametrize("k_scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("storage", [FP8, torch.uint8], ids=str)
@BLOCK_SIZES
def test_fp8_e4m3(block_size: int, storage: torch.dtype, k_scale: object, device: str) -> None:
    table = paged(block_size, device)
    cache = fp8_cache(table.num_blocks, block_size, device)
    factor = 1.0 if k_scale is None else torch.tensor(float(k_scale), dtype=torch.float32)
    expected = expected_rows((cache.float() * factor).flatten(0, 1), table.rows)
    k_scale = k_scale.to(device) if isinstance(k_scale, torch.Tensor) else k_scale
    for layout in ("auto", "fp8_e4m3"):
        out = mla_prefill.gather_latent(cache.view(storage), **table.kwargs(), k_scale=k_scale, layout=layout)
        assert_same_bits(out, expected.bfloat16())


def test_fp8_e4m3_into_every_dtype(dtype: torch.dtype, device: str) -> None:
    table = paged(16, device)
    cache = fp8_cache(table.num_blocks, 16, device)
    out = torch.empty(227, WIDTH, dtype=dtype, device=device)
    mla_prefill.gather_latent(cache, **table.kwargs(), out=out, k_scale=0.37)
    factor = torch.tensor(0.37, dtype=torch.float32)
    assert_same_bits(out, expected_rows((cache.float() * factor).flatten(0, 1), table.rows).to(dtype))


def test_every_fp8_code(dtype: torch.dtype, device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).reshape(1, 1, 256)
    out = torch.empty(1, 256, dtype=dtype, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    mla_prefill.gather_latent(codes, table, int32([0, 1], device), int32([0], device), out=out, k_scale=2.0)
    expected = (codes[0].view(FP8).float() * 2).to(dtype)
    assert torch.equal(out.isnan(), expected.isnan()) and int(expected.isnan().sum()) == 2
    assert torch.equal(out[~out.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("shape", [(2,), (1, 1), (227,), (0,)], ids=str)
def test_a_scale_per_token_is_refused(shape: tuple[int, ...]) -> None:
    table = paged(16)
    with pytest.raises(RuntimeError, match=r"k_scale: expected one scale .*, got shape \["):
        mla_prefill.gather_latent(fp8_cache(table.num_blocks, 16, "cpu"), **table.kwargs(), k_scale=torch.ones(shape))


def test_scale_of_another_dtype_is_refused() -> None:
    table = paged(16)
    with pytest.raises(RuntimeError, match="k_scale: expected float32, got float64"):
        mla_prefill.gather_latent(
            fp8_cache(table.num_blocks, 16, "cpu"), **table.kwargs(), k_scale=torch.ones((), dtype=torch.float64)
        )


# ---- fp8_ds_mla ------------------------------------------------------------------------------------------------------


def pack_ds_mla(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, 576] -> uint8 [n, 656], and the values that come back: 512 float8 e4m3, then 4 float32 scales, one
    per 128 values, then 64 bfloat16."""
    packed = torch.zeros(rows.shape[0], 656, dtype=torch.uint8)
    values = torch.empty(rows.shape)
    for tile in range(4):
        part = rows[:, 128 * tile : 128 * (tile + 1)]
        scale = part.abs().amax(dim=1, keepdim=True) / 448.0
        quantized = (part / scale).to(FP8)
        packed[:, 128 * tile : 128 * (tile + 1)] = quantized.view(torch.uint8)
        packed[:, 512 + 4 * tile : 512 + 4 * (tile + 1)] = scale.contiguous().view(torch.uint8)
        values[:, 128 * tile : 128 * (tile + 1)] = quantized.float() * scale
    rope = rows[:, 512:].bfloat16().contiguous()
    packed[:, 528:] = rope.view(torch.uint8)
    values[:, 512:] = rope.float()
    return packed, values


@pytest.mark.parametrize("storage", [torch.uint8, FP8], ids=str)
@pytest.mark.parametrize("layout", ["dense", "sliced", "odd_offset"])
@BLOCK_SIZES
def test_fp8_ds_mla(block_size: int, layout: str, storage: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """Tiles of very different sizes, so that one tile's scale on another would show; rows at odd addresses."""
    table = paged(block_size, device)
    sizes = torch.tensor([1e-3, 1.0, 30.0, 1e3]).repeat_interleave(128)
    rows = random_cache(table.num_blocks * block_size, 1, torch.float32, "cpu").squeeze(1)
    rows[:, :512] *= sizes
    packed, values = pack_ds_mla(rows)
    cache = packed.reshape(table.num_blocks, block_size, 656).to(device)
    cache = place(cache, layout, fill=255).view(storage)
    expected = expected_rows(values.to(device), table.rows).to(dtype)
    out = torch.empty(227, WIDTH, dtype=dtype, device=device)
    for name in ("auto", "fp8_ds_mla"):
        mla_prefill.gather_latent(cache, **table.kwargs(), out=out.fill_(NAN), layout=name)
        assert_same_bits(out, expected)
    allocated = mla_prefill.gather_latent(cache, **table.kwargs())
    assert allocated.dtype == torch.bfloat16 and allocated.shape == (227, WIDTH)


def test_A21_fp8_ds_mla_carries_its_own_scales(device: str) -> None:
    packed, values = pack_ds_mla(random_cache(64, 1, torch.float32, "cpu").squeeze(1))
    cache = packed.reshape(1, 64, 656).to(device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = mla_prefill.gather_latent(cache, table, int32([0, 64], device), int32([0], device), k_scale=3.0)
    assert_same_bits(out, values.bfloat16().to(device))


# ---- A22: pairs of layout and dtype ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache_dtype", "width", "layout", "out_dtype", "message"),
    [
        (
            FP8,
            576,
            "plain",
            None,
            r"cache: expected bfloat16, float16 or float32 with layout 'plain', got float8_e4m3fn",
        ),
        (torch.uint8, 656, "plain", None, r"cache: expected bfloat16, .* 'plain', got uint8"),
        (torch.bfloat16, 576, "fp8_e4m3", None, r"cache: expected .* with layout 'fp8_e4m3', got bfloat16"),
        (torch.float32, 656, "fp8_ds_mla", None, r"cache: expected .* 656 bytes with layout 'fp8_ds_mla', got float32"),
        (torch.uint8, 576, "fp8_ds_mla", None, r"cache: expected .* 656 bytes .*, got uint8 of shape \[4, 16, 576\]"),
        (torch.float8_e5m2, 576, "auto", None, r"cache: expected .*, got float8_e5m2"),
        (torch.float8_e5m2, 576, "fp8_e4m3", None, r"cache: expected .*, got float8_e5m2"),
        (torch.int8, 656, "fp8_ds_mla", None, r"cache: expected .*, got int8"),
        (torch.float64, 576, "auto", None, r"cache: expected .*, got float64"),
        (torch.bfloat16, 576, "auto", torch.float16, r"out: expected the cache's dtype, bfloat16, got float16"),
        (torch.float32, 576, "plain", torch.bfloat16, r"out: expected the cache's dtype, float32, got bfloat16"),
        (FP8, 576, "auto", FP8, r"out: expected bfloat16, float16 or float32 .*, got float8_e4m3fn"),
        (torch.uint8, 656, "auto", torch.float64, r"out: expected bfloat16, float16 or float32 .*, got float64"),
        (torch.bfloat16, 576, "nhd", None, r"layout: expected 'auto', .* or 'fp8_ds_mla', got 'nhd'"),
    ],
)
def test_A22_unsupported_pairs_are_refused_by_name(
    cache_dtype: torch.dtype, width: int, layout: str, out_dtype: torch.dtype | None, message: str
) -> None:
    cache = torch.zeros(4, 16, width).to(cache_dtype)
    table = torch.zeros(1, 4, dtype=torch.int32)
    out = None if out_dtype is None else torch.full((5, WIDTH), 7.0).to(out_dtype)
    with pytest.raises(RuntimeError, match=message):
        mla_prefill.gather_latent(cache, table, int32([0, 5]), int32([0]), layout=layout, out=out)
    assert out is None or (out.float() == 7).all()


def test_infinite_values_pass_through(device: str) -> None:
    cache = torch.full((1, 2, WIDTH), INF, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    out = mla_prefill.gather_latent(cache, table, int32([0, 2], device), int32([0], device))
    assert torch.isposinf(out).all()
