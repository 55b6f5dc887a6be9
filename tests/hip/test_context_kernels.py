"""gather_latent and merge_states as compiled for AMD GPUs, against the CPU kernels."""

from __future__ import annotations

import pytest
import torch
from helpers import INF, NAN, assert_same_bits, embed, int32
from kernels import ARCHITECTURES, code_object, gather_latent, merge_states

import mla_prefill

pytestmark = pytest.mark.usefixtures("toolchain")

ARCH = pytest.mark.parametrize("arch", ARCHITECTURES)
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
State = tuple[torch.Tensor, torch.Tensor]


def state(dtype: torch.dtype, seed: int, dim: int = 128) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(7, 3, dim, generator=generator).to(dtype)
    return out, 3 * torch.randn(3, 7, generator=generator)


def packs(dtype: torch.dtype) -> tuple[int, int]:
    """Elements that a lane moves at once, aligned and not."""
    return 16 // dtype.itemsize, 1


def assert_merges(a: State, b: State, pack: int, arch: str, dtype: torch.dtype) -> State:
    expected_out, expected_lse = mla_prefill.merge_states(*a, *b)
    out = embed(a[0].shape, dtype)
    lse = embed(a[1].shape, torch.float32)
    merge_states(code_object("merge", arch), *a, *b, out.view, lse.view, pack=pack)
    out.assert_rest_untouched()
    lse.assert_rest_untouched()
    assert torch.equal(lse.view.isneginf(), expected_lse.isneginf())
    live = ~expected_lse.isneginf()
    assert torch.allclose(lse.view[live], expected_lse[live], rtol=0, atol=4e-6)
    tolerance = 4 * torch.finfo(dtype).eps  # exp may round the weights, and so the result, the other way
    assert torch.allclose(out.view.float(), expected_out.float(), rtol=tolerance, atol=tolerance)
    return out.view, lse.view


@ARCH
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_merge(arch: str, dtype: torch.dtype) -> None:
    """Of states anywhere in memory, with the same bits when they are exchanged. Of some tokens one side is so far below
    the other that it weighs nothing."""
    a, b = state(dtype, 1), state(dtype, 2)
    a[1][:, 5] += 400
    b[1][:, 6] += 400
    b_head_major = b[0].transpose(0, 1).contiguous().transpose(0, 1), b[1].t().contiguous().t()
    for pack in packs(dtype):
        expected = assert_merges(a, b, pack, arch, dtype)
        got = assert_merges(b_head_major, a, pack, arch, dtype)
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1], expected[1])
    assert_merges(state(dtype, 1, 33), state(dtype, 2, 33), 1, arch, dtype)


@pytest.mark.parametrize("pack", packs(torch.bfloat16))
def test_merge_with_dead_sides(pack: int) -> None:
    a, b = state(torch.bfloat16, 1), state(torch.bfloat16, 2)
    for side, token, mark in ((a, 0, INF), (b, 1, -INF), (a, 2, -INF), (b, 2, INF)):
        side[1][:, token] = mark
        side[0][token] = NAN
    a[0][1, 0], b[0][0, 0] = -0.0, -0.0
    out, lse = assert_merges(a, b, pack, "gfx942", torch.bfloat16)
    assert_same_bits(out[0], b[0][0])  # the live side as it is
    assert_same_bits(out[1], a[0][1])
    assert (out[2] == 0).all() and lse[:, 2].isneginf().all()


@pytest.mark.parametrize("into", ["a", "b"])
def test_merge_into_an_input(into: str) -> None:
    a, b = state(torch.bfloat16, 1), state(torch.bfloat16, 2)
    expected = assert_merges(a, b, 8, "gfx942", torch.bfloat16)
    target = a if into == "a" else b
    merge_states(code_object("merge", "gfx942"), *a, *b, *target, pack=8)
    assert_same_bits(target[0], expected[0])
    assert_same_bits(target[1], expected[1])


def ds_mla_rows(blocks: int, block_size: int) -> torch.Tensor:
    """Rows of 512 float8 values, 4 scales and 64 bfloat16 values."""
    rows = torch.empty(blocks, block_size, 656, dtype=torch.uint8)
    rows[..., :512] = torch.randn(blocks, block_size, 512).to(torch.float8_e4m3fn).view(torch.uint8)
    rows[..., 512:528] = torch.rand(blocks, block_size, 4).view(torch.uint8)
    rows[..., 528:] = torch.randn(blocks, block_size, 64).to(torch.bfloat16).view(torch.uint8)
    return rows


def caches() -> dict[str, tuple[torch.Tensor, list[torch.dtype]]]:
    """A cache of each layout, and the dtypes that it can be gathered to."""
    torch.manual_seed(3)
    values = torch.randn(9, 4, 576)
    every_byte = torch.arange(9 * 4 * 576).remainder(256).to(torch.uint8).reshape(9, 4, 576)  # NaN and subnormals too
    return {
        "bfloat16": (values.to(torch.bfloat16), [torch.bfloat16]),
        "float16": (values.to(torch.float16), [torch.float16]),
        "float32": (values, [torch.float32]),
        "fp8_e4m3": (every_byte, FLOATS),
        "fp8_ds_mla": (ds_mla_rows(9, 4), FLOATS),
    }


@ARCH
@pytest.mark.parametrize("name", list(caches()))
def test_gather(name: str, arch: str) -> None:
    """Tokens past their row of the block table or in blocks outside the cache give zeros; other rows stay. Told of more
    blocks before those that are there, the kernel reads beyond 2^32 elements."""
    cache, dtypes = caches()[name]
    layout = name if name.startswith("fp8") else "plain"
    table = torch.tensor([[3, 1, 7], [8, 99, -1], [0, 2, 4]], dtype=torch.int32)
    bounds = int32([2, 9, 11, 18])
    starts = int32([8, 7, 1])  # to past the row of request 0, in blocks 99 and -1, inside the row of request 2
    k_scale = torch.tensor([0.75]) if layout == "fp8_e4m3" else None
    for dtype in dtypes:
        for pack, first_block in ((8, 0), (1, 4_000_000)):
            out = torch.full((20, 576), 5.0, dtype=dtype)
            expected = out.clone()
            options = {"layout": layout, "k_scale": k_scale}
            mla_prefill.gather_latent(cache, table, bounds, starts, out=expected, **options)
            options |= {"pack": pack, "first_block": first_block}
            gather_latent(code_object("gather", arch), cache, table, bounds, starts, out, **options)
            assert_same_bits(out, expected)


def test_gather_of_many_requests() -> None:
    """More than one step of the search leads to some."""
    cache, lens = caches()["bfloat16"][0], [i % 3 for i in range(30)]
    table = torch.arange(90, dtype=torch.int32).remainder(9).reshape(30, 3)
    bounds = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    starts = torch.arange(30, dtype=torch.int32).remainder(8)
    out = torch.full((sum(lens), 576), 5.0, dtype=torch.bfloat16)
    expected = mla_prefill.gather_latent(cache, table, bounds, starts)
    gather_latent(
        code_object("gather", "gfx942"), cache, table, bounds, starts, out, layout="plain", k_scale=None, pack=8
    )
    assert_same_bits(out, expected)


def test_gather_before_the_row_of_the_block_table() -> None:
    """On a device neither starts can be checked before the launch,"""
    cache = torch.ones(2, 4, 576, dtype=torch.bfloat16)
    out = torch.full((3, 576), 5.0, dtype=torch.bfloat16)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    gather_latent(
        code_object("gather", "gfx942"), cache, table, int32([0, 3]), int32([-2]), out, layout="plain", pack=8
    )
    assert out[:, 0].tolist() == [0, 0, 1]


def test_gather_never_writes_past_out() -> None:
    """nor cu_seqlens."""
    cache = torch.ones(2, 4, 576, dtype=torch.bfloat16)
    out = embed((3, 576), torch.bfloat16)
    bounds, starts = int32([0, 6]), int32([0])
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    gather_latent(code_object("gather", "gfx942"), cache, table, bounds, starts, out.view, layout="plain", pack=8)
    assert (out.view == 1).all()
    out.assert_rest_untouched()
