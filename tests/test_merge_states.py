"""merge_states against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    INF,
    LAYOUTS,
    NAN,
    Embedded,
    assert_same_bits,
    embed,
    merge_in,
    place,
    skip_without_kernel,
    skip_without_memory,
)

import mla_prefill

State = tuple[torch.Tensor, torch.Tensor]
DEAD = pytest.mark.parametrize("mark", [INF, -INF], ids=["+inf", "-inf"])
PAYLOAD = pytest.mark.parametrize("payload", [NAN, INF, 5.0], ids=["nan", "inf", "5"])


@pytest.fixture
def device(device: str) -> str:
    skip_without_kernel("merge_states", device)
    return device


def state(dtype: torch.dtype, device: str, seed: int, tokens: int = 37, heads: int = 5, dim: int = 128) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens, heads, dim, generator=generator).to(dtype).to(device)
    lse = (3 * torch.randn(heads, tokens, generator=generator)).to(device)
    return out, lse


def two_states(dtype: torch.dtype, device: str, **sizes: int) -> tuple[State, State]:
    return state(dtype, device, 1, **sizes), state(dtype, device, 2, **sizes)


def assert_is_merge(got: State, a: State, b: State) -> None:
    """Of live states. Both are averages with weights that add to one, so errors count against the larger input; the
    unavoidable ones are the rounding of the result and that of float32 weights."""
    out, lse = got
    expected, expected_lse = merge_in(torch.float64, *a, *b)
    size = torch.maximum(a[0].double().abs(), b[0].double().abs()).amax(dim=-1, keepdim=True).clamp(min=1e-30)
    tiny = 8 * torch.finfo(torch.float32).eps * (1 + float(expected_lse.abs().max()))
    error = float(((out.double() - expected).abs() / size).max())
    assert error <= torch.finfo(out.dtype).eps / 2 + tiny
    assert float((lse.double() - expected_lse).abs().max()) <= tiny


def guarded_outputs(a: State, layout: str) -> tuple[Embedded, Embedded]:
    out = embed(a[0].shape, a[0].dtype, str(a[0].device), layout=layout)
    lse = embed(a[1].shape, torch.float32, str(a[0].device), layout=layout)
    out.view.fill_(NAN)
    lse.view.fill_(NAN)
    return out, lse


@pytest.mark.parametrize("dim", [1, 7, 128, 256])
@pytest.mark.parametrize("heads", [1, 5, 16])
def test_formula(dim: int, heads: int, dtype: torch.dtype, device: str) -> None:
    a, b = two_states(dtype, device, heads=heads, dim=dim)
    out, lse = mla_prefill.merge_states(*a, *b)
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    assert_is_merge((out, lse), a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout: str, dtype: torch.dtype, device: str) -> None:
    """The lse of a backend that returns (tokens, heads) comes as a transposed view."""
    a, b = two_states(dtype, device)
    expected = mla_prefill.merge_states(*a, *b)
    out, lse = guarded_outputs(a, layout)
    token_major_lse = b[1].t().contiguous().t()
    result = mla_prefill.merge_states(
        place(a[0], layout), place(a[1], layout), place(b[0], layout), token_major_lse, out=out.view, lse=lse.view
    )
    assert result[0] is out.view and result[1] is lse.view
    assert_same_bits(out.view, expected[0])
    assert_same_bits(lse.view, expected[1])
    out.assert_rest_untouched()
    lse.assert_rest_untouched()


@pytest.mark.parametrize("into", ["a", "b"])
def test_output_may_be_an_input(into: str, dtype: torch.dtype, device: str) -> None:
    a, b = two_states(dtype, device)
    a[1][0, :3], b[1][1, :3] = -INF, INF
    expected = mla_prefill.merge_states(*a, *b)
    other = (b if into == "a" else a)[0].clone()
    target = a if into == "a" else b
    out, lse = mla_prefill.merge_states(*a, *b, out=target[0], lse=target[1])
    assert out is target[0] and lse is target[1]
    assert_same_bits(out, expected[0])
    assert_same_bits(lse, expected[1])
    assert_same_bits((b if into == "a" else a)[0], other)


@DEAD
@PAYLOAD
@pytest.mark.parametrize("side", ["a", "b"])
def test_A05_dead_side_has_weight_0(side: str, payload: float, mark: float, dtype: torch.dtype, device: str) -> None:
    """The live side comes out with its very bits, whatever the dead one holds."""
    live, dead = state(dtype, device, 1), state(dtype, device, 2)
    dead[0].fill_(payload)
    dead[1].fill_(mark)
    a, b = (dead, live) if side == "a" else (live, dead)
    out, lse = mla_prefill.merge_states(*a, *b)
    assert_same_bits(out, live[0])
    assert_same_bits(lse, live[1])


@PAYLOAD
@pytest.mark.parametrize("marks", [(INF, INF), (INF, -INF), (-INF, INF), (-INF, -INF)], ids=str)
def test_A05_two_dead_sides_give_0_and_minus_inf(
    marks: tuple[float, float], payload: float, dtype: torch.dtype, device: str
) -> None:
    a, b = two_states(dtype, device)
    for (out, lse), mark in zip((a, b), marks, strict=True):
        out.fill_(payload)
        lse.fill_(mark)
    out, lse = mla_prefill.merge_states(*a, *b)
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_A05_dead_and_live_rows_side_by_side(dtype: torch.dtype, device: str) -> None:
    """Per head and token, as a batch of fresh and chunked requests has them."""
    a, b = two_states(dtype, device)
    expected = mla_prefill.merge_states(*a, *b)
    kinds = torch.arange(a[1].numel(), device=device).reshape(a[1].shape) % 4
    for (out, lse), kind, mark in ((a, 1, INF), (b, 2, -INF), (a, 3, -INF), (b, 3, INF)):
        out[(kinds == kind).t()] = NAN
        lse[kinds == kind] = mark
    out, lse = mla_prefill.merge_states(*a, *b)
    for kind, want in ((0, expected), (1, b), (2, a)):
        assert_same_bits(out[(kinds == kind).t()], want[0][(kinds == kind).t()])
        assert_same_bits(lse[kinds == kind], want[1][kinds == kind])
    assert (out[(kinds == 3).t()] == 0).all() and torch.isneginf(lse[kinds == 3]).all()


@pytest.mark.parametrize("lse_a", [0.0, 1e5, -1e5, 3e38, -3e38])
@pytest.mark.parametrize("gap", [0.0, 1.0, 80.0, 1e4])
def test_lse_of_any_size(lse_a: float, gap: float, dtype: torch.dtype, device: str) -> None:
    a, b = two_states(dtype, device)
    a[1].fill_(lse_a)
    b[1].fill_(lse_a + gap)
    for one, other in ((a, b), (b, a)):
        out, lse = mla_prefill.merge_states(*one, *other)
        assert out.isfinite().all() and lse.isfinite().all()
        torch.testing.assert_close(lse.double(), torch.logaddexp(a[1].double(), b[1].double()), rtol=1e-6, atol=1e-6)
    if gap >= 80.0 and abs(lse_a) <= 1e5:
        torch.testing.assert_close(out, b[0], rtol=0, atol=1e-6)


def test_a_minus_0_beside_a_dead_side_keeps_its_sign(dtype: torch.dtype, device: str) -> None:
    live, dead = state(dtype, device, 1), state(dtype, device, 2)
    live[0].fill_(-0.0)
    dead[1].fill_(-INF)
    for a, b in ((live, dead), (dead, live)):
        assert_same_bits(mla_prefill.merge_states(*a, *b)[0], live[0])
    assert_same_bits(mla_prefill.merge_states(*dead, *dead)[0], torch.zeros_like(dead[0]))


def test_merge_commutes_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    a, b = two_states(dtype, device)
    one, other = mla_prefill.merge_states(*a, *b), mla_prefill.merge_states(*b, *a)
    assert_same_bits(one[0], other[0])
    assert_same_bits(one[1], other[1])


def test_rows_do_not_depend_on_their_place(dtype: torch.dtype, device: str) -> None:
    a, b = two_states(dtype, device)
    out, lse = mla_prefill.merge_states(*a, *b)
    for rows in (slice(0, 1), slice(5, 20), slice(36, 37)):
        part = mla_prefill.merge_states(a[0][rows], a[1][:, rows], b[0][rows], b[1][:, rows])
        assert_same_bits(part[0], out[rows])
        assert_same_bits(part[1], lse[:, rows])


def test_no_tokens(dtype: torch.dtype, device: str) -> None:
    a, b = two_states(dtype, device, tokens=0)
    out, lse = mla_prefill.merge_states(*a, *b)
    assert out.shape == (0, 5, 128) and lse.shape == (5, 0)


@pytest.mark.gpu
def test_A11_the_reported_size() -> None:
    skip_without_memory("cuda", 24 * 2**30)
    tokens, heads, dim = 1_048_580, 32, 128
    a, b = (torch.full((tokens, heads, dim), value, dtype=torch.bfloat16, device="cuda") for value in (1.0, 3.0))
    lse_a, lse_b = (torch.zeros(heads, tokens, device="cuda") for _ in range(2))
    lse_b[:, -2:] = -INF
    mla_prefill.merge_states(a, lse_a, b, lse_b, out=a, lse=lse_a)
    for rows in a[:-2].split(2**16):
        assert (rows == 2).all()
    assert (a[-2:] == 1).all() and (lse_a[:, -2:] == 0).all()
    torch.testing.assert_close(lse_a[:, :-2], torch.full_like(lse_a[:, :-2], 2.0).log())


@pytest.mark.parametrize("which", ["out_a", "lse_a", "out"])
def test_A11_offsets_past_32_bits(which: str) -> None:
    """The reported row 1,048,576 of [tokens, 32, 128] is element 2^32; here few rows lie that far apart."""
    a, b = two_states(torch.bfloat16, "cpu", tokens=3)
    expected = mla_prefill.merge_states(*a, *b)

    def far_apart(values: torch.Tensor, dim: int) -> torch.Tensor:
        strides = list(values.stride())
        strides[dim] = 2**31 + 8  # the memory between is never touched
        return torch.empty(2**32 + 2**20, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)

    out = None
    if which == "out_a":
        a = far_apart(a[0], 0), a[1]
    elif which == "lse_a":
        a = a[0], far_apart(a[1], 1)
    else:
        out = far_apart(torch.zeros_like(a[0]), 0)
    got = mla_prefill.merge_states(*a, *b, out=out)
    assert_same_bits(got[0], expected[0])
    assert_same_bits(got[1], expected[1])
