"""ragged_prefill against the float64 oracle, and the oracle against torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cases import CASES, HEAD_DIMS, MLA, Case
from helpers import (
    INF,
    LAYOUTS,
    Inputs,
    assert_matches_oracle,
    assert_same_bits,
    check,
    cu_seqlens,
    int32,
    make_inputs,
    quantize,
    run,
    skip_refused,
    skip_without_memory,
    visible_keys,
)

import mla_prefill

Rounding = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
RAGGED = Case("ragged", (33, 0, 5, 1, 70), (70, 3, 0, 97, 70), 3, True)


def by_name(*prefixes: str) -> list[Case]:
    return [case for case in CASES if case.name.startswith(prefixes)]


# ---- the oracle itself -----------------------------------------------------------------------------------------------


def sdpa(inputs: Inputs) -> torch.Tensor:
    """torch's attention in float64, one sequence at a time, with a mask built row by row from the contract's words."""
    joined = inputs.with_joined_k()
    out = torch.zeros(joined.out_shape, dtype=torch.float64)
    for rows, keys in joined.bounds():
        len_q, len_k = rows.stop - rows.start, keys.stop - keys.start
        mask = torch.tensor(
            [[not joined.causal or j <= i + len_k - len_q for j in range(len_k)] for i in range(len_q)],
            dtype=torch.bool,
        ).reshape(len_q, len_k)
        live = mask.any(dim=1)
        q, k, v = (x.double().transpose(0, 1) for x in (joined.q[rows], joined.k[keys], joined.v[keys]))
        if live.any():
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[:, live], k, v, attn_mask=mask[live], scale=joined.scale
            )
            out[rows][live] = attended.transpose(0, 1)
    return out


@pytest.mark.parametrize("case", [c for c in CASES if c.pairs < 1e5], ids=str)
def test_oracle_is_torch_attention(case: Case) -> None:
    inputs = make_inputs(case, torch.float64, scale=0.2)
    out, lse = mla_prefill.reference.ragged_prefill(**inputs.kwargs(), return_lse=True)
    assert out.dtype == lse.dtype == torch.float64 and lse.shape == (case.num_heads, sum(case.q_lens))
    torch.testing.assert_close(out, sdpa(inputs), rtol=1e-11, atol=1e-12)
    assert torch.equal(torch.isneginf(lse), (visible_keys(inputs) == 0).expand_as(lse))


def test_oracle_lse_is_the_log_of_the_sum() -> None:
    inputs = make_inputs(Case("lse", (3,), (5,), 2, True), torch.float64, scale=0.3)
    _, lse = mla_prefill.reference.ragged_prefill(**inputs.kwargs(), return_lse=True)
    joined = inputs.with_joined_k()
    for head in range(2):
        for row in range(3):
            total = sum(math.exp(0.3 * float(joined.q[row, head] @ joined.k[key, head])) for key in range(row + 3))
            assert lse[head, row] == pytest.approx(math.log(total), rel=1e-12)


def without_last_key(inputs: Inputs) -> Inputs:
    """What a kernel computes whose loop ends one key too early."""
    lens = [keys.stop - keys.start for _, keys in inputs.bounds()]
    index = torch.cat([torch.arange(keys.start, keys.stop - 1) for _, keys in inputs.bounds()])
    shorter = inputs.map_tensors(lambda x: x[index], "k", "v", "k_pe")
    return replace(shorter, cu_seqlens_k=cu_seqlens([n - 1 for n in lens]))


@pytest.mark.parametrize(
    "fault",
    {
        "one_key_missing": without_last_key,
        "scale_off_by_a_percent": lambda inputs: replace(inputs, scale=inputs.scale * 1.01),
        "mask_forgotten": lambda inputs: replace(inputs, causal=False),
        "wrong_neighbour": lambda inputs: replace(inputs, cu_seqlens_k=inputs.cu_seqlens_k - int32([0, 1, 0])),
        "value_of_another_head": lambda inputs: replace(inputs, v=inputs.v.roll(1, dims=1)),
        "rope_forgotten": lambda inputs: replace(inputs, k_pe=torch.zeros_like(inputs.k_pe)),
    }.items(),
    ids=lambda item: item[0],
)
def test_the_tolerance_notices_faults(fault: tuple[str, Callable[[Inputs], Inputs]], dtype: torch.dtype) -> None:
    """Of a kind that an absolute bound made for short rows lets pass in a sequence of 2000 keys."""
    inputs = make_inputs(Case("fault", (3, 40), (50, 2000), 2, True), dtype)
    faulty = mla_prefill.ragged_prefill(**fault[1](inputs).kwargs(), return_lse=True)
    with pytest.raises(AssertionError, match="error"):
        assert_matches_oracle(inputs, *faulty)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).float()


def truncated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Toward 0, to the precision of ``dtype``."""
    dropped = int(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    return (x.contiguous().view(torch.int32) & -dropped).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fault", ["weights", "out"])
def test_the_tolerance_notices_truncation(fault: str, dtype: torch.dtype) -> None:
    """Of weights that are summed as they were, as kernels on matrix units compute, and of the result."""
    inputs = make_inputs(Case("truncation", (100,), (150,), 3, False), dtype)
    joined = inputs.with_joined_k()
    q, k, v = (x.float().transpose(0, 1) for x in (joined.q, joined.k, joined.v))
    logits = inputs.scale * q @ k.transpose(1, 2)
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))

    def attend(round_weights: Rounding, round_out: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
        out = round_weights(weights, dtype) @ v / weights.sum(dim=-1, keepdim=True)
        return round_out(out.transpose(0, 1), dtype).to(dtype), torch.logsumexp(logits, dim=-1)

    assert_matches_oracle(inputs, *attend(rounded, rounded))
    faulty = attend(truncated, rounded) if fault == "weights" else attend(rounded, truncated)
    with pytest.raises(AssertionError, match="out: mean relative error -"):
        assert_matches_oracle(inputs, *faulty)


# ---- the table of shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: Case, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(case, dtype, device, layout="projection"))


@pytest.mark.parametrize("case", by_name("tile_edges", "A08", "A01_no_keys", "dims_", "odd_dims"), ids=str)
def test_joined_k_matches_oracle(case: Case, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(case, dtype, device, split_k=False))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [MLA, (40, 24, 33)], ids=str)
def test_any_strides_and_offsets(layout: str, dims: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """A12: a transposed batched GEMM's strides; A13: slices of a fused projection, odd element offsets."""
    case = Case("strides", (33, 1, 64), (70, 20, 64), 5, True, dims)
    out, lse = check(make_inputs(case, dtype, device, layout=layout), out_layout=layout)
    dense = run(make_inputs(case, dtype, device))
    assert_same_bits(out, dense[0])
    assert_same_bits(lse, dense[1])


def test_A12_head_stride_beyond_the_rows(device: str) -> None:
    """The reported strides: q_nope [256, 32, 512] as (512, 131072, 1)."""
    case = Case("A12", (256,), (32,), 32, False, (512, 0, 16))
    inputs = make_inputs(case, torch.bfloat16, device, layout="head_major")
    assert inputs.q.stride() == (512, 131072, 1)
    check(inputs)


def test_k_pe_may_have_a_head_dimension(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(RAGGED, dtype, device)
    out, lse = run(inputs)
    latent = torch.zeros(inputs.k.shape[0], 1, 576, dtype=dtype, device=device)
    latent[..., 512:] = inputs.k_pe.unsqueeze(1)
    for k_pe in (inputs.k_pe.unsqueeze(1), latent[..., 512:]):
        again = run(inputs.map_tensors(lambda _, k_pe=k_pe: k_pe, "k_pe"))
        assert_same_bits(again[0], out)
        assert_same_bits(again[1], lse)


@pytest.mark.parametrize("dims", HEAD_DIMS.values(), ids=HEAD_DIMS)
def test_A15_output_is_exactly_as_wide_as_v(dims: tuple[int, int, int], device: str) -> None:
    inputs = make_inputs(Case("A15", (3,), (4,), 2, True, dims), torch.bfloat16, device)
    skip_refused(inputs)
    out = mla_prefill.ragged_prefill(**inputs.kwargs())
    assert out.shape == (3, 2, dims[2]) and out.is_contiguous() and out.dtype == torch.bfloat16


def test_A18_lse_is_heads_by_tokens_in_float32(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(Case("A18", (4, 247), (4, 247), 5, True), dtype, device)
    out, lse = mla_prefill.ragged_prefill(**inputs.kwargs(), return_lse=True)
    assert lse.shape == (5, 251) and lse.dtype == torch.float32
    assert_matches_oracle(inputs, out, lse)


def test_returns_out_alone_unless_asked(device: str) -> None:
    inputs = make_inputs(RAGGED, torch.bfloat16, device)
    alone = mla_prefill.ragged_prefill(**inputs.kwargs())
    out, _ = mla_prefill.ragged_prefill(**inputs.kwargs(), return_lse=True)
    assert_same_bits(alone, out)


# ---- answers known in closed form ------------------------------------------------------------------------------------


def uniform(len_q: int, len_k: int, causal: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """All logits 0, and key j's value is j + 1 in every element: a row's output is the mean of what it sees."""
    case = Case("uniform", (len_q,), (len_k,), 2, causal)
    inputs = make_inputs(case, dtype, device)
    inputs.q.zero_()
    inputs.v.copy_(torch.arange(1, len_k + 1, device=device).reshape(-1, 1, 1).expand_as(inputs.v))
    return inputs


def test_A07_causal_is_aligned_bottom_right(device: str) -> None:
    out, lse = run(uniform(2, 5, True, device))
    assert (out[0] == 2.5).all() and (out[1] == 3.0).all()
    torch.testing.assert_close(lse.cpu(), torch.tensor([4.0, 5.0]).log().expand(2, 2), rtol=1e-6, atol=0)


def test_A08_first_rows_see_nothing_when_there_are_more_rows_than_keys(device: str) -> None:
    out, lse = run(uniform(5, 2, True, device))
    assert (out[:3] == 0).all() and torch.isneginf(lse[:, :3]).all()
    assert (out[3] == 1.0).all() and (out[4] == 1.5).all()


@pytest.mark.parametrize("keys", [1, 2, 1000, 4096])
def test_A19_lse_is_a_natural_log(keys: int, device: str) -> None:
    _, lse = run(uniform(1, keys, False, device))
    torch.testing.assert_close(lse.cpu(), torch.full((2, 1), math.log(keys)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [0.1147213867929261, 1.0, 0.0, -0.05, 1e-3])
def test_A20_the_scale_is_the_callers(scale: float, dtype: torch.dtype, device: str) -> None:
    """1.59 and 1.87 times 192 ** -0.5 are real YaRN scales; nothing is derived from a head dim."""
    check(make_inputs(RAGGED, dtype, device, scale=scale))


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_of_a_hundred_thousand(sign: int, dtype: torch.dtype, device: str) -> None:
    """No finite stand-in for -inf may exceed real logits: a row whose logits are all about -1e5 is an ordinary row."""
    inputs = make_inputs(Case("large", (40,), (200,), 2, True), dtype, device, scale=sign * 97.65625)  # 1e5 / 1024
    for x in (inputs.q, inputs.k, inputs.k_pe):
        x.zero_()
    inputs.q[..., 0] = 32
    inputs.k[..., 0] = 32
    inputs.k[1::2, :, 0] = 30
    out, lse = run(inputs)
    # The keys with the larger logit share all the weight; a float32 logit of 1e5 is known to 1e-2.
    first, logit = (0, 1e5) if sign > 0 else (1, -93750.0)
    for row in range(40):
        heavy = inputs.v[first : row + 161 : 2].double()
        torch.testing.assert_close(out[row].double(), heavy.mean(dim=0), rtol=2e-2, atol=1e-2)
        expected_lse = torch.full((2,), logit + math.log(len(heavy)))
        torch.testing.assert_close(lse[:, row].cpu(), expected_lse, rtol=1e-6, atol=0)


def test_logits_of_minus_infinity_in_the_first_key_tiles(dtype: torch.dtype, device: str) -> None:
    """As if those keys were not there. No row has a reference before the second or third key tile."""
    inputs = make_inputs(Case("hidden", (200,), (700,), 2, False), dtype, device)
    inputs.q[..., 0].abs_().add_(1)
    inputs.k[:200, :, 0] = -INF
    seen = inputs.map_tensors(lambda x: x[200:], "k", "v", "k_pe")
    expected = check(replace(seen, cu_seqlens_k=cu_seqlens([500], inputs.device)))
    for got, want in zip(run(inputs), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=2e-3)


@pytest.mark.parametrize("jump", [50.0, 8192.0])
def test_row_maximum_that_rises_in_the_last_key(jump: float, dtype: torch.dtype, device: str) -> None:
    """Everything summed before is scaled down to nothing, without an overflow on the way; and the other way round."""
    inputs = make_inputs(Case("jump", (3,), (300,), 2, False), dtype, device, scale=1.0)
    for key in (299, 0):
        for x in (inputs.q, inputs.k, inputs.k_pe):
            x.zero_()
        inputs.q[..., 1] = 1
        inputs.k[key, :, 1] = jump
        out, lse = check(inputs)
        torch.testing.assert_close(out, inputs.v[key].expand_as(out), rtol=0, atol=1e-6)
        torch.testing.assert_close(lse.cpu(), torch.full((2, 3), jump), rtol=1e-6, atol=0)


# ---- float8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
@pytest.mark.parametrize("case", by_name("A01_no_keys", "tile_edges", "A08", "dims_glm", "A17_5"), ids=str)
def test_float8_matches_oracle(case: Case, per_head: bool, device: str) -> None:
    out, lse = check(quantize(make_inputs(case, torch.float32, device), per_head))
    assert out.dtype == torch.bfloat16 and not out.isnan().any() and (lse < INF).all()


def test_AX14_float8_is_deterministic_at_600_to_700_tokens(device: str) -> None:
    case = Case("AX14", (600, 650, 700), (600, 650, 700), 1, True)
    inputs = quantize(make_inputs(case, torch.float32, device))
    out, lse = check(inputs)
    for _ in range(2):
        again = run(inputs)
        assert_same_bits(again[0], out)
        assert_same_bits(again[1], lse)


def test_float8_factors_are_applied_once_each(device: str) -> None:
    inputs = quantize(make_inputs(RAGGED, torch.float32, device))
    plain = run(inputs)
    one = torch.ones(1, device=device)
    by_hand = inputs.map_tensors(lambda _: one, "q_descale", "k_descale", "v_descale")
    factors = [float(x) for x in (inputs.q_descale, inputs.k_descale, inputs.v_descale)]
    by_hand = Inputs(**{**by_hand.kwargs(), "scale": inputs.scale * factors[0] * factors[1]})
    out, lse = run(by_hand)
    torch.testing.assert_close(lse, plain[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float() * factors[2], plain[0].float(), rtol=1e-2, atol=1e-6)


# ---- instruction sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize(
    "case", by_name("A01_no_keys", "tile_edges", "query_tile_edges", "odd_dims", "chunked_prefill"), ids=str
)
def test_every_instruction_set(case: Case, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is compiled once per instruction set; a machine otherwise runs only the best of them."""
    monkeypatch.setenv("MLA_PREFILL_CPU_ISA", isa)
    inputs = make_inputs(case, torch.bfloat16, layout="projection")
    try:
        check(inputs)
    except RuntimeError as error:
        assert str(error).startswith("MLA_PREFILL_CPU_ISA: expected one of") and isa in str(error)
        pytest.skip(str(error))
    for dtype in (torch.float32, torch.float16):
        check(make_inputs(case, dtype))
    check(quantize(make_inputs(case, torch.float32)))


def test_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_CPU_ISA", "sse9")
    with pytest.raises(RuntimeError, match=r"MLA_PREFILL_CPU_ISA: expected one of .*baseline.*, got sse9"):
        run(make_inputs(RAGGED, torch.bfloat16))


# ---- offsets past 2^31 elements --------------------------------------------------------------------------------------


def far_apart(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values with a stride that puts the last entry of ``dim`` past 2^32 elements. The memory between is
    never touched, so on the CPU it costs address space only."""
    step = 2**32 // (values.shape[dim] - 1) // 8 * 8 + 8  # a multiple of 16 bytes
    strides = list(values.stride())
    strides[dim] = step
    buffer = torch.empty(2**32 + 2**20, dtype=values.dtype, device=values.device)
    view = buffer.as_strided(values.shape, strides)
    view.copy_(values)
    return view


@pytest.mark.parametrize(
    ("name", "dim"), [("k_pe", 0), *((name, dim) for name in ("q", "k", "v", "out") for dim in (0, 1))]
)
def test_A10_offsets_past_32_bits(name: str, dim: int, device: str) -> None:
    """Of rows (dim 0) and of heads (dim 1)."""
    skip_without_memory(device, 10 * 2**30)
    inputs = make_inputs(Case("A10", (9, 4), (9, 7), 3, True), torch.bfloat16, device)
    expected, expected_lse = run(inputs)
    out = far_apart(torch.zeros_like(expected), dim) if name == "out" else None
    if name != "out":
        inputs = inputs.map_tensors(lambda x: far_apart(x.contiguous(), dim), name)
    out, lse = mla_prefill.ragged_prefill(**inputs.kwargs(), out=out, return_lse=True)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)


def test_A10_more_sequences_than_fit_32_bits_of_row_offsets() -> None:
    """257 sequences of 512 rows at H = 128, D = 128 pass 2^31 elements; here rows are that far apart, and few."""
    lens = (2,) * 257
    case = Case("A10", lens, lens, 1, True, (128, 0, 128))
    inputs = make_inputs(case, torch.bfloat16)
    expected = run(inputs)
    wide = inputs.map_tensors(lambda x: far_apart(x.contiguous(), 0), "q")
    out, lse = run(wide)
    assert_same_bits(out, expected[0])
    assert_same_bits(lse, expected[1])


def test_cu_seqlens_needs_no_alignment_beyond_4_bytes(device: str) -> None:
    inputs = make_inputs(RAGGED, torch.bfloat16, device)
    expected = run(inputs)
    for shift in range(4):
        bounds = [int32([0] * shift + x.tolist(), device)[shift:] for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
        out, lse = run(Inputs(**{**inputs.kwargs(), "cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1]}))
        assert_same_bits(out, expected[0])
        assert_same_bits(lse, expected[1])


def test_hundred_thousand_sequences(device: str) -> None:
    """Of no or one row and key: the answer is v and scale * (q . k), or nothing."""
    count = 100_000
    q_lens = [int(i % 3 != 0) for i in range(count)]
    kv_lens = [int(i % 5 != 0) for i in range(count)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, 1, 192, generator=generator).bfloat16().to(device) for n in (sum(q_lens), *[sum(kv_lens)] * 2)
    )
    inputs = Inputs(q, k, v[..., :128], cu_seqlens(q_lens, device), cu_seqlens(kv_lens, device), 0.1, True)
    out, lse = run(inputs)
    key_of_row = [key for key, rows in zip(torch.tensor(kv_lens).cumsum(0).tolist(), q_lens, strict=True) if rows]
    has_key = torch.tensor([bool(keys) for keys, rows in zip(kv_lens, q_lens, strict=True) if rows], device=device)
    key = torch.tensor(key_of_row, device=device) - 1
    assert torch.equal(out[has_key], v[..., :128][key[has_key]])
    assert (out[~has_key] == 0).all() and torch.isneginf(lse[:, ~has_key]).all()
    expected_lse = 0.1 * (q[has_key].double() * k[key[has_key]].double()).sum(dim=-1).t()
    torch.testing.assert_close(lse[:, has_key].double(), expected_lse, rtol=1e-5, atol=1e-5)
