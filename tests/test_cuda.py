"""What can go wrong on a GPU only. The contract that all devices share is tested there too, by the tests that take the
``device`` fixture: the table of shapes, isolation, hints, opcheck, bad arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from cases import HEAD_DIMS, MLA, Case
from helpers import (
    GPU_KERNELS,
    INF,
    LAYOUTS,
    NAN,
    Inputs,
    accumulate,
    assert_matches_oracle,
    assert_refused_by_kernel,
    assert_same_bits,
    check,
    cu_seqlens,
    gpu_kernels,
    int32,
    make_inputs,
    merge_in,
    partial_passes,
    place,
    quantize,
    run,
    skip_without_memory,
    use_kernel,
)

import mla_prefill
from mla_prefill import PrefillPlan, plan_prefill

pytestmark = pytest.mark.gpu

State = tuple[torch.Tensor, torch.Tensor]
Dims = tuple[int, int, int]

# On Hopper, sequences of at most 128 keys take the kernel of small tiles, the others that of large ones.
MIXED = Case("mixed", (128, 1, 0, 64, 300, 7, 500, 33, 129, 40), (1100, 64, 9, 128, 300, 0, 500, 129, 127, 20), 5, True)
LONG = Case("long", (600, 70), (2500, 4000), 4, True)
SHORT = Case("short", tuple(1 + i * 7 % 65 for i in range(300)), tuple(i * 13 % 129 for i in range(300)), 3, True)
BOTH_MASKS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
# Few queries on long contexts: 2, 1, 4, 16, 1 and 2 pieces on Hopper, 4, 1, 8, 16, 1 and 4 of the portable kernel.
SPLIT = Case("split", (100, 0, 300, 1, 40, 130), (8500, 700, 17000, 66000, 100, 9001), 3, True)
FEW_PIECES = Case("few_pieces", (20, 3), (4200, 100), 3, True)  # of the portable kernel's plan alone
CASES = pytest.mark.parametrize(
    "case",
    [
        MIXED,
        replace(MIXED, causal=False, name="mixed_full"),
        LONG,
        SHORT,
        SPLIT,
        replace(SPLIT, causal=False, name="split_full"),
        FEW_PIECES,
    ],
    ids=str,
)
ALIGNED_LAYOUTS = tuple(layout for layout in LAYOUTS if layout != "odd_offset")  # for every kernel

SLEEP = 300_000_000  # clock cycles for torch.cuda._sleep: longer than any of these tests takes to enqueue its work


@pytest.fixture(params=GPU_KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that every call of the test takes."""
    use_kernel(request.param, monkeypatch)
    return request.param


@pytest.fixture
def device(kernel: str) -> str:
    return "cuda"


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def large_memory(device: str) -> Iterator[None]:
    skip_without_memory(device, 24 * 2**30)
    yield
    torch.cuda.empty_cache()


def attend(inputs: Inputs, **options: object) -> State:
    """Enqueues the call and nothing else, unlike ``run``."""
    return mla_prefill.ragged_prefill(**inputs.kwargs(), return_lse=True, **options)


def projected(inputs: Inputs) -> Inputs:
    """The same k and v as the two slices of one tensor, as the output of kv_b_proj gives them."""
    widths = [inputs.k.shape[2], inputs.v.shape[2]]
    k, v = torch.cat([inputs.k, inputs.v], dim=-1).split(widths, dim=-1)
    return replace(inputs, k=k, v=v)


def plan_of(inputs: Inputs, **options: object) -> PrefillPlan:
    nope = inputs.k.shape[2]
    return plan_prefill(
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        num_heads=inputs.q.shape[1],
        causal=inputs.causal,
        head_dims=(nope, inputs.q.shape[2] - nope, inputs.v.shape[2]),
        dtype=inputs.q.dtype,
        **{"max_tokens_q": inputs.q.shape[0], **options},
    )


def assert_same(got: State, expected: State) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


# ---- right answers ---------------------------------------------------------------------------------------------------


@BOTH_MASKS
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_tile_edges(rows: int, causal: bool, dtype: torch.dtype, device: str) -> None:
    keys = (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
    check(make_inputs(Case("edges", (rows,) * len(keys), keys, 2, causal), dtype, device, layout="projection"))


@CASES
def test_mixed_lengths(case: Case, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(case, dtype, device, layout="projection"))


@pytest.mark.parametrize("heads", [1, 3, 5, 8, 12, 16, 20, 128])
def test_any_number_of_heads(heads: int, dtype: torch.dtype, device: str) -> None:
    case = Case("heads", (3, 40, 0, 17, 130, 200), (35, 40, 9, 120, 300, 129), heads, True)
    inputs = make_inputs(case, dtype, device, layout="projection")
    assert_same(run(inputs.with_joined_k()), check(inputs))


@pytest.mark.parametrize("layout", LAYOUTS)
@CASES
def test_layouts_do_not_change_bits(case: Case, layout: str, dtype: torch.dtype, device: str) -> None:
    """Split and joined K, slices of a projection and of a latent row, head-major and padded strides."""
    dense = make_inputs(case, dtype, device)
    expected = run(dense)
    laid_out = make_inputs(case, dtype, device, layout=layout)
    latent = torch.full((dense.k.shape[0], 576), NAN, dtype=dtype, device=device)
    latent[:, 512:] = dense.k_pe
    for inputs in (
        laid_out,
        make_inputs(case, dtype, device, split_k=False, layout=layout),
        projected(dense),
        projected(dense.with_joined_k()),
        replace(laid_out, k_pe=latent[:, 512:]),
        replace(laid_out, k_pe=latent.unsqueeze(1)[..., 512:]),
    ):
        assert_same(run(inputs, out_layout=layout), expected)


def test_strides_of_one_row_or_head_are_free(dtype: torch.dtype, device: str) -> None:
    """Nothing steps over them, so they need no alignment."""
    inputs = make_inputs(Case("one", (1,), (1,), 1, True), dtype, device)

    def odd(x: torch.Tensor) -> torch.Tensor:
        strides = (777, 333, 1) if x.dim() == 3 else (777, 1)
        return x.as_strided(x.shape, strides)

    assert_same(run(inputs.map_tensors(odd, "q", "k", "v", "k_pe")), check(inputs))


# ---- other head dims -------------------------------------------------------------------------------------------------

HOPPER_DIMS = ((64, 64, 128), (128, 0, 128), (192, 0, 128), (192, 64, 256), (256, 0, 256))
PORTABLE_DIMS = (
    *(dims for dims in HEAD_DIMS.values() if dims != MLA),
    (64, 32, 64),  # MiniCPM3
    (64, 0, 64),
    (128, 0, 128),
    (128, 64, 64),
    (64, 128, 128),
    (192, 0, 128),
    (8, 0, 8),  # from here on: padded in shared memory
    (16, 8, 24),
    (40, 40, 72),
    (72, 24, 40),
    (104, 16, 128),
    (136, 48, 120),
    (200, 24, 136),
    (24, 16, 256),
)
ODD_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, 160, 200, 257)
EDGES = Case("edges", ODD_LENGTHS, tuple(ODD_LENGTHS[(5 * i + 3) % 19] for i in range(19)), 2, True)


@pytest.fixture(
    params=[*(("sm90", dims) for dims in HOPPER_DIMS), *(("sm80", dims) for dims in PORTABLE_DIMS)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def kernel_and_dims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Dims]:
    """The kernel that every call of the test takes, and head dims for it."""
    use_kernel(request.param[0], monkeypatch)
    return request.param


def layouts_for(kernel: str) -> tuple[str, ...]:
    return LAYOUTS if kernel == "sm80" else ALIGNED_LAYOUTS


@pytest.mark.parametrize("split_k", [True, False], ids=["split_k", "joined_k"])
@BOTH_MASKS
def test_other_head_dims(causal: bool, split_k: bool, dtype: torch.dtype, kernel_and_dims: tuple[str, Dims]) -> None:
    kernel, dims = kernel_and_dims
    for case in (EDGES, MIXED, SPLIT, *((LONG, SHORT) if kernel == "sm90" else ())):
        case = replace(case, causal=causal, head_dims=dims)
        inputs = make_inputs(case, dtype, "cuda", layout="projection", split_k=split_k)
        expected = check(inputs)
        assert_same(run(inputs, plan=plan_of(inputs)), expected)


def test_layouts_of_other_head_dims(dtype: torch.dtype, kernel_and_dims: tuple[str, Dims]) -> None:
    kernel, dims = kernel_and_dims
    case = replace(EDGES, head_dims=dims)
    expected = run(make_inputs(case, dtype, "cuda"))
    for layout in layouts_for(kernel):
        for split_k in (True, False):
            inputs = make_inputs(case, dtype, "cuda", layout=layout, split_k=split_k)
            assert_same(run(inputs, out_layout=layout), expected)


def test_state_and_isolation_of_other_head_dims(dtype: torch.dtype, kernel_and_dims: tuple[str, Dims]) -> None:
    """Batch invariance, NaN all around, and chunks folded into a running state, in every kernel variant."""
    kernel, dims = kernel_and_dims
    other = Case("other", (128, 1, 0, 64, 130, 7), (300, 64, 9, 128, 0, 257), 5, True, dims)
    for case in (other, replace(SPLIT, head_dims=dims)):
        inputs = make_inputs(case, dtype, "cuda")
        out, lse = run(inputs)
        amid_nan = run(make_inputs(case, dtype, "cuda", before=3, after=70, outside=NAN))
        assert_same((amid_nan[0][3:-70], amid_nan[1][:, 3:-70]), (out, lse))
        for index, (rows, _) in enumerate(inputs.bounds()):
            assert_same(run(inputs.sequence(index)), (out[rows], lse[:, rows]))
        passes = partial_passes(inputs, 3)
        results = [accumulate(passes, layout) for layout in layouts_for(kernel)]
        assert_matches_oracle(inputs, *results[0], passes=len(passes))
        for result in results[1:]:
            assert_same(result, results[0])


def test_which_kernel_serves_other_head_dims(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper its own kernel serves where it has the dims, the portable one where k_pe is not 64 wide."""
    monkeypatch.delenv("MLA_PREFILL_FORCE", raising=False)
    if gpu_kernels() != ["sm90", "sm80"]:
        pytest.skip("not the two kernels of Hopper")
    cases = [replace(MIXED, head_dims=dims) for dims in ((64, 64, 128), (128, 0, 128), (192, 64, 256), (96, 32, 128))]
    batches = [make_inputs(case, dtype, "cuda") for case in cases]
    got = [run(inputs, plan=plan_of(inputs)) for inputs in batches]
    for kernel, inputs, result in zip(("sm90", "sm90", "sm90", "sm80"), batches, got, strict=True):
        use_kernel(kernel, monkeypatch)
        assert_same(run(inputs), result)


@CASES
@pytest.mark.parametrize("dims", [MLA, (192, 64, 256)], ids=str)
def test_any_kernel_walks_over_any_plan(
    dims: Dims, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan_prefill does not see the tensors, so the kernel may turn out to be another than it was made for. Tiles are
    the plan's then, and bits may differ."""
    inputs = make_inputs(replace(case, head_dims=dims), dtype, "cuda")
    kernels = gpu_kernels()
    if len(kernels) < 2:
        pytest.skip("one kernel for this device")
    plans = {}
    for kernel in kernels:
        use_kernel(kernel, monkeypatch)
        plans[kernel] = plan_of(inputs)
    for kernel in kernels:
        use_kernel(kernel, monkeypatch)
        for plan in plans.values():
            once = run(inputs, plan=plan)
            assert_matches_oracle(inputs, *once)
            assert_same(run(inputs, plan=plan), once)
        assert_same(run(inputs, plan=plans[kernel]), run(inputs))


def test_what_the_hopper_kernel_refuses_the_portable_one_computes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a plan that was made for the other, too. Nothing is forced."""
    monkeypatch.delenv("MLA_PREFILL_FORCE", raising=False)
    if "sm80" not in gpu_kernels():
        pytest.skip("no sm80 kernel for this device")
    inputs = make_inputs(MIXED, dtype, "cuda", layout="odd_offset")
    plan = plan_of(inputs)
    got, planned = check(inputs), run(inputs, plan=plan)
    use_kernel("sm80", monkeypatch)
    assert_same(got, run(inputs))
    assert_same(planned, got)


def test_an_unknown_kernel_can_not_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.hip:
        pytest.skip("one kernel for AMD GPUs")
    inputs = make_inputs(MIXED, torch.bfloat16, "cuda")
    monkeypatch.setenv("MLA_PREFILL_FORCE", "sm70")
    for call in (attend, plan_of):
        with pytest.raises(RuntimeError, match=r"^MLA_PREFILL_FORCE: expected sm.*, got sm70"):
            call(inputs)


# ---- large logits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logit", [1e5, -1e5, 98765.0, 300.0])
def test_equal_logits_weigh_the_same_in_every_key_tile(logit: float, dtype: torch.dtype, device: str) -> None:
    """An error of the running maximum's rounding would grow with every tile, and shift weight between the ends."""
    keys = 16384
    inputs = make_inputs(Case("equal", (70,), (keys,), 1, False), dtype, device, scale=abs(logit) / 961)
    for x in (inputs.q, inputs.k, inputs.k_pe, inputs.v):
        x.zero_()
    inputs.q[..., 0] = 31
    inputs.k[..., 0] = 31 if logit > 0 else -31
    inputs.v[: keys // 2, :, 0] = 1
    inputs.v[keys // 2 :, :, 1] = 1
    out, lse = run(inputs)
    torch.testing.assert_close(
        out[..., :2], torch.full_like(out[..., :2], 0.5), rtol=2 * torch.finfo(dtype).eps, atol=0
    )
    assert (out[..., 2:] == 0).all()
    expected = torch.logsumexp(torch.full((keys,), logit, dtype=torch.float64), 0).item()
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=0)


@BOTH_MASKS
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_random_large_logits(scale: float, causal: bool, dtype: torch.dtype, device: str) -> None:
    """Up to about 2e4, one key per row with nearly all the weight."""
    check(make_inputs(replace(MIXED, causal=causal), dtype, device, scale=scale))


@BOTH_MASKS
@pytest.mark.parametrize("rise", [30.0, 300.0])
def test_logits_that_rise_along_the_keys(rise: float, causal: bool, dtype: torch.dtype, device: str) -> None:
    """The reference of some rows' weights is raised again and again. Their neighbours in a warp don't notice."""
    inputs = make_inputs(Case("rising", (300, 5), (1500, 900), 2, causal), dtype, device)
    rises = torch.arange(305, device=device) % 3 == 0
    inputs.k[..., 0] = torch.linspace(0, 8, 2400, device=device)[:, None]
    inputs.q[..., 0] = torch.where(rises, rise / 8 / inputs.scale, 0.0)[:, None]
    out, lse = check(inputs)
    inputs.q[rises] = 0
    calm = ~rises
    got_out, got_lse = run(inputs)
    assert_same((got_out[calm], got_lse[:, calm]), (out[calm], lse[:, calm]))


def test_lse_of_a_long_sequence(dtype: torch.dtype, device: str) -> None:
    """512 key tiles, logits of a few hundred: float32 must do for all of it."""
    check(make_inputs(Case("long", (16,), (65536,), 1, True), dtype, device, scale=5.0))


# ---- the same bits, whatever is around -------------------------------------------------------------------------------


@CASES
def test_50_runs_give_the_same_bits(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(case, dtype, device, layout="projection")
    expected = run(inputs)
    plan = plan_of(inputs)
    state = torch.randn_like(expected[0]), torch.randn_like(expected[1])
    merged = tuple(x.clone() for x in state)
    attend(inputs, out=merged[0], lse=merged[1], accumulate=True)
    for repeat in range(50):
        assert_same(attend(inputs, plan=plan if repeat % 2 else None), expected)
        again = tuple(x.clone() for x in state)
        attend(inputs, out=again[0], lse=again[1], accumulate=True)
        assert_same(again, merged)


def rebatch(inputs: Inputs, chosen: Sequence[int], before: int) -> tuple[Inputs, torch.Tensor]:
    """These sequences in this order behind ``before`` rows of NaN, and which row of ``inputs`` each row is."""
    bounds = inputs.bounds()

    def index(parts: list[slice]) -> torch.Tensor:
        own = [torch.arange(part.start, part.stop) for part in parts]
        return torch.cat([torch.zeros(before, dtype=torch.int64), *own]).to(inputs.q.device)

    def take(rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def from_rows(x: torch.Tensor) -> torch.Tensor:
            taken = x[rows]
            taken[:before] = NAN
            return taken

        return from_rows

    parts_q, parts_k = ([bounds[b][side] for b in chosen] for side in (0, 1))
    rows = index(parts_q)
    batch = inputs.map_tensors(take(rows), "q").map_tensors(take(index(parts_k)), "k", "v", "k_pe")
    lens_q, lens_k = ([part.stop - part.start for part in parts] for parts in (parts_q, parts_k))
    return replace(
        batch,
        cu_seqlens_q=cu_seqlens(lens_q, inputs.device, before),
        cu_seqlens_k=cu_seqlens(lens_k, inputs.device, before),
    ), rows


@CASES
def test_batch_invariance(case: Case, dtype: torch.dtype, device: str) -> None:
    """Alone, in any batch, at any offset, short and long sequences mixed."""
    inputs = make_inputs(case, dtype, device, layout="projection")
    out, lse = run(inputs)
    count = len(case.q_lens)
    for index, (rows, _) in enumerate(inputs.bounds()[:20]):
        assert_same(run(inputs.sequence(index)), (out[rows], lse[:, rows]))
    generator = torch.Generator().manual_seed(2)
    orders = [list(reversed(range(count))), torch.randperm(count, generator=generator).tolist()]
    orders += [torch.randint(count, (size,), generator=generator).tolist() for size in (2, 3, 2 * count)]
    for before, order in enumerate(orders):
        batch, rows = rebatch(inputs, order, before)
        got_out, got_lse = run(batch)
        assert_same((got_out[before:], got_lse[:, before:]), (out[rows[before:]], lse[:, rows[before:]]))


def test_heads_do_not_matter_to_each_other(dtype: torch.dtype, device: str) -> None:
    """A rank with a part of the heads computes the same bits."""
    inputs = make_inputs(replace(MIXED, num_heads=20), dtype, device)
    out, lse = run(inputs)
    for heads in (slice(0, 1), slice(3, 11), slice(19, 20)):
        part = inputs.map_tensors(lambda x, heads=heads: x[:, heads], "q", "k", "v")
        assert_same(run(part), (out[:, heads], lse[heads]))


@pytest.mark.parametrize("factor", [8, 10**7], ids=["eight_times", "huge"])
def test_hints_do_not_change_bits(factor: int, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(MIXED, dtype, device)
    hints = {"max_seqlen_q": factor * max(MIXED.q_lens), "max_seqlen_k": factor * max(MIXED.kv_lens)}
    expected = run(inputs)
    assert_same(run(inputs, **hints), expected)
    assert_same(run(inputs, plan=plan_of(inputs, **hints), **hints), expected)


# ---- memory of nobody, and of others ---------------------------------------------------------------------------------


def whole_buffer(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0).set_(x.untyped_storage())


@BOTH_MASKS
@pytest.mark.parametrize("hostile", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "projection"])
def test_poison_all_around(layout: str, hostile: float, causal: bool, dtype: torch.dtype, device: str) -> None:
    """Before, behind and between rows, in rows that only a sequence without partners owns, and beside cu_seqlens."""
    case = Case("gaps", (33, 0, 20, 130, 0, 64, 1), (70, 150, 0, 300, 40, 64, 129), 3, causal)
    expected = run(make_inputs(case, dtype, device))
    first, behind = 3, 37
    inputs = make_inputs(case, dtype, device, before=first, after=behind, outside=hostile)
    for (rows, keys), len_q, len_k in zip(inputs.bounds(), case.q_lens, case.kv_lens, strict=True):
        if len_q == 0:
            for x in (inputs.k, inputs.v, inputs.k_pe):
                x[keys] = hostile
        if len_k == 0:
            inputs.q[rows] = hostile
    if layout == "projection":
        inputs = projected(inputs)
    else:
        inputs = inputs.map_tensors(lambda x: place(x, layout, fill=hostile), "q", "k", "v", "k_pe")

    def amid_nonsense(bounds: torch.Tensor) -> torch.Tensor:
        return int32([2**31 - 1] * 9 + bounds.tolist() + [-(2**31)] * 9, device)[9:-9]

    inputs = inputs.map_tensors(amid_nonsense, "cu_seqlens_q", "cu_seqlens_k")
    names = ("q", "k", "v", "k_pe", "cu_seqlens_q", "cu_seqlens_k")
    before = {name: whole_buffer(getattr(inputs, name)).clone() for name in names}
    out, lse = run(inputs, out_layout="dense" if layout == "projection" else layout)
    assert_same((out[first:-behind], lse[:, first:-behind]), expected)
    for name in names:
        assert_same_bits(whole_buffer(getattr(inputs, name)), before[name])


@BOTH_MASKS
def test_poisoned_neighbours(causal: bool, dtype: torch.dtype, device: str) -> None:
    case = Case("neighbours", (64, 65, 1, 200, 128), (128, 129, 64, 333, 63), 2, causal)
    clean = make_inputs(case, dtype, device)
    out, lse = run(clean)
    for rows, keys in clean.bounds():

        def only(part: slice) -> Callable[[torch.Tensor], torch.Tensor]:
            def keep(x: torch.Tensor) -> torch.Tensor:
                kept = torch.full_like(x, NAN)
                kept[part] = x[part]
                return kept

            return keep

        poisoned = clean.map_tensors(only(rows), "q").map_tensors(only(keys), "k", "v", "k_pe")
        got_out, got_lse = run(poisoned)
        assert_same((got_out[rows], got_lse[:, rows]), (out[rows], lse[:, rows]))


@pytest.mark.parametrize("split_k", [True, False], ids=["split_k", "joined_k"])
def test_A10_tensors_of_more_than_2_31_elements(split_k: bool, device: str, large_memory: None) -> None:
    """Two sequences behind row 2^20 of tensors with 16 heads: offsets of q, k, v and out past 2^31 elements."""
    first, heads = 2**20, 16
    near = make_inputs(Case("A10", (150, 7), (333, 90), heads, True), torch.bfloat16, device, split_k=split_k)
    expected = check(near)

    def far(x: torch.Tensor) -> torch.Tensor:
        rows = torch.full((first + x.shape[0], *x.shape[1:]), NAN, dtype=x.dtype, device=device)
        rows[first:] = x
        return rows

    inputs = near.map_tensors(far, "q", "k", "k_pe", "v")
    inputs = inputs.map_tensors(lambda bounds: bounds + first, "cu_seqlens_q", "cu_seqlens_k")
    out = torch.full(inputs.out_shape, NAN, dtype=torch.bfloat16, device=device)
    lse = torch.full(inputs.lse_shape, NAN, device=device)
    assert min(x.numel() for x in (inputs.q, inputs.k, inputs.v, out)) > 2**31
    attend(inputs, out=out, lse=lse)
    assert_same((out[first:], lse[:, first:]), expected)
    assert lse[:, :first].isnan().all() and all(out[at : at + 2**16].isnan().all() for at in range(0, first, 2**16))


def test_A10_a_stride_that_TMA_can_not_take(kernel: str, device: str, large_memory: None) -> None:
    inputs = make_inputs(Case("A10", (2,), (5,), 1, True), torch.bfloat16, device)
    buffer = torch.empty(2**33 + 192, dtype=torch.bfloat16, device=device)
    far = replace(inputs, q=buffer.as_strided((2, 1, 192), (2**33, 192, 1)))
    far.q.copy_(inputs.q)
    expected = run(inputs)
    if kernel == "sm80":
        assert_same(run(far), expected)
    else:
        assert_refused_by_kernel("q", far, *expected)


# ---- accumulate ------------------------------------------------------------------------------------------------------


@BOTH_MASKS
@pytest.mark.parametrize("num_chunks", [2, 7])
def test_chunks_add_up_to_one_pass(num_chunks: int, causal: bool, dtype: torch.dtype, kernel: str, device: str) -> None:
    case = Case("chunks", (300, 64, 1, 129, 40), (3000, 700, 2000, 129, 20), 4, causal)
    inputs = make_inputs(case, dtype, device, layout="projection")
    passes = partial_passes(inputs, num_chunks)
    results = [accumulate(passes, layout) for layout in layouts_for(kernel)]
    assert_matches_oracle(inputs, *results[0], passes=len(passes))
    for other in results[1:]:
        assert_same(other, results[0])


@BOTH_MASKS
def test_dead_and_live_states_side_by_side(causal: bool, dtype: torch.dtype, device: str) -> None:
    """Of the rows and heads of one tile: what is dead (lse +inf or -inf, NaN in out) must not spread."""
    inputs = make_inputs(replace(MIXED, causal=causal), dtype, device)
    own_out, own_lse = run(inputs)
    generator = torch.Generator().manual_seed(3)
    state_lse = 3 * torch.randn(inputs.lse_shape, generator=generator).to(device)
    state_out = torch.randn(inputs.out_shape, generator=generator).to(dtype).to(device)
    kind = torch.randint(4, inputs.lse_shape, generator=generator).to(device)
    state_lse[kind == 0] = INF
    state_lse[kind == 1] = -INF
    dead = kind < 2
    state_out[dead.t()] = NAN
    out, lse = state_out.clone(), state_lse.clone()
    attend(inputs, out=out, lse=lse, accumulate=True)

    def assert_is(where: torch.Tensor, expected: State) -> None:
        assert_same((out[where.t()], lse[where]), (expected[0][where.t()], expected[1][where]))

    no_key = torch.isneginf(own_lse)
    assert_is(dead, (own_out, own_lse))
    assert_is(~dead & no_key, (state_out, state_lse))
    both = ~dead & ~no_key
    merged, merged_lse = merge_in(torch.float64, state_out, state_lse, own_out, own_lse)
    size = torch.maximum(state_out.abs(), own_out.abs()).double().amax(dim=-1, keepdim=True)
    error = ((out.double() - merged).abs() / size)[both.t()]
    assert error.max() <= torch.finfo(dtype).eps  # half of it for own_out, half for the result
    torch.testing.assert_close(lse[both].double(), merged_lse[both], rtol=1e-6, atol=2e-6)


@BOTH_MASKS
def test_a_pass_without_keys(causal: bool, dtype: torch.dtype, device: str) -> None:
    """Live states keep their bits; dead ones become 0 and -inf."""
    inputs = make_inputs(Case("no_keys", (1, 64, 0, 200), (0,) * 4, 5, causal), dtype, device)
    lse = torch.randn(inputs.lse_shape, device=device)
    lse[:, ::3], lse[:, 1::3] = INF, -INF
    dead = lse.isinf()
    out = torch.randn(inputs.out_shape, device=device).to(dtype)
    out[dead.t()] = NAN
    expected = out.masked_fill(dead.t().unsqueeze(-1), 0.0), lse.masked_fill(dead, -INF)
    attend(inputs, out=out, lse=lse, accumulate=True)
    assert_same((out, lse), expected)


# ---- the plan --------------------------------------------------------------------------------------------------------

HEADER_INTS, ITEMS_BEGIN, ITEM_INTS, SHORT_KEYS = 24, 2072, 8, 128


def random_lens(batch: int, seed: int) -> tuple[list[int], list[int]]:
    """A fifth without rows, a fifth without keys, a third short, a few very long."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int) -> torch.Tensor:
        return torch.randint(1, high, (batch,), generator=generator)

    def chance(probability: float) -> torch.Tensor:
        return torch.rand(batch, generator=generator) < probability

    keys = below(5000).where(chance(0.67), below(200)).where(~chance(0.01), below(100_000)) * ~chance(0.2)
    return (below(300) * ~chance(0.2)).tolist(), keys.tolist()


# Query rows and keys, of the plan for head dims from 128 on.
TILES = {"sm90": (128, 128), "sm80": (128, 64), "hip": (128, 32)}
HOPPER_WIDE_TILE = (128, 80)  # for a V of 256 columns; no sequence is short then


def assert_host_plans_the_same(
    kernel: str, q_lens: Sequence[int], kv_lens: Sequence[int], num_heads: int, causal: bool, dims: Dims = MLA
) -> None:
    binding = pytest.importorskip("mla_prefill._C")
    bounds = [cu_seqlens(lens, start=start) for lens, start in ((q_lens, 5), (kv_lens, 0))]
    host = binding.plan_items(*(x.tolist() for x in bounds), num_heads, causal, *dims, backend=kernel)
    expected = torch.tensor(host, dtype=torch.int32).reshape(-1, ITEM_INTS)
    plan = plan_prefill(
        *(int32(x.tolist(), "cuda") for x in bounds),
        num_heads=num_heads,
        causal=causal,
        head_dims=dims,
        max_tokens_q=sum(q_lens),
    )
    got = plan.tensor.cpu()
    assert int(got[1]) == len(expected) <= plan.capacity
    assert torch.equal(got[ITEMS_BEGIN:].view(-1, ITEM_INTS)[: len(expected)], expected)
    is_wide = kernel == "sm90" and dims[2] == 256
    tiles = HOPPER_WIDE_TILE if is_wide else TILES[kernel]
    version, _, capacity, batch, heads, mask, tile_q, tile_kv, first_short, *rest = got[:HEADER_INTS].tolist()
    split_end, counters = rest[:4], rest[4:]
    assert (capacity, batch, heads, bool(mask)) == (plan.capacity, len(q_lens), num_heads, causal)
    assert version >= 1 and (tile_q, tile_kv) == tiles and not any(counters)
    assert not got[HEADER_INTS:ITEMS_BEGIN].any()
    splits = expected[:, 7].tolist()
    assert splits == sorted(splits, reverse=True)
    assert split_end == [sum(split >= pieces for split in splits) for pieces in (16, 8, 4, 2)]
    short_keys = SHORT_KEYS if kernel == "sm90" and not is_wide else -1
    short = torch.tensor([*kv_lens, 0])[expected[:, 0].long()] <= short_keys
    assert not short[:first_short].any() and short[first_short:].all()


@pytest.fixture
def large_sm() -> None:
    """The tiles above are those of an SM with Hopper's shared memory."""
    if torch.version.hip is None and torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 227 * 1024:
        pytest.skip("a device with less shared memory has other tiles")


@pytest.mark.parametrize(("num_heads", "causal"), [(1, True), (5, False), (16, True)])
@pytest.mark.parametrize("batch", [0, 1, 2, 31, 32, 33, 511, 512, 513, 1024, 1025, 5000])
def test_device_planner_is_the_host_planner(
    batch: int, num_heads: int, causal: bool, kernel: str, large_sm: None
) -> None:
    assert_host_plans_the_same(kernel, *random_lens(batch, seed=batch), num_heads, causal)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([0] * 3000, [700] * 3000),
        ([0] * 1024 + [5], [9] * 1025),
        ([3] * 2000, [700] * 2000),
        ([3] * 2000, [SHORT_KEYS, SHORT_KEYS + 1] * 1000),
        ([100_000], [1_000_000]),
    ],
    ids=["no_rows", "last_only", "equal", "around_short", "one_huge"],
)
def test_planners_agree_on_odd_batches(q_lens: list[int], kv_lens: list[int], kernel: str, large_sm: None) -> None:
    for causal in (True, False):
        assert_host_plans_the_same(kernel, q_lens, kv_lens, 12, causal)


def test_planners_agree_on_128_heads(kernel: str, large_sm: None) -> None:
    assert_host_plans_the_same(kernel, *random_lens(40, seed=9), 128, True)


@pytest.mark.parametrize("dims", HOPPER_DIMS, ids=str)
def test_planners_agree_on_other_head_dims(dims: Dims, kernel: str, large_sm: None) -> None:
    """Keys of more or fewer bytes: other heads in a group."""
    assert_host_plans_the_same(kernel, *random_lens(100, seed=11), 128, True, dims)


def test_planners_agree_on_hundred_thousand_sequences(kernel: str, large_sm: None) -> None:
    count = 100_000
    assert_host_plans_the_same(kernel, [i % 4 for i in range(count)], [i * 37 % 600 for i in range(count)], 1, True)


def test_plan_with_too_little_room_is_cut_off(device: str) -> None:
    """max_tokens_q below the rows can't be seen without waiting for the GPU. Rows without an item are left alone."""
    inputs = make_inputs(Case("cut", (2000, 3), (2000, 50), 4, True), torch.bfloat16, device)
    whole, cut = plan_of(inputs), plan_of(inputs, max_tokens_q=300)
    assert cut.num_items == cut.capacity < whole.num_items
    assert cut.items() == whole.items()[: cut.num_items]
    expected_out, _ = run(inputs)
    out, _ = run(inputs, plan=cut)
    written = ~out.isnan().any(dim=-1)
    assert 0 < written.sum() < written.numel()
    assert_same_bits(out[written], expected_out[written])


@CASES
def test_one_plan_serves_many_layers(case: Case, dtype: torch.dtype, device: str) -> None:
    """Enqueued back to back: the plan's counters are as new when the next layer starts."""
    layers = [make_inputs(case, dtype, device, seed=seed) for seed in range(8)]
    expected = [run(layer) for layer in layers]
    plan = plan_of(layers[0])
    before = plan.tensor.clone()
    results = [attend(layer, plan=plan) for _ in range(3) for layer in layers]
    for index, result in enumerate(results):
        assert_same(result, expected[index % len(layers)])
    assert torch.equal(plan.tensor, before)


# ---- keys in pieces --------------------------------------------------------------------------------------------------


def test_more_pieces_than_slots(dtype: torch.dtype, kernel: str, device: str) -> None:
    """Slots for partial results are used again and again; accumulated on itself twice, the state is still right."""
    case = Case("rounds", (8,) * 20, (16_500,) * 20, 8, False)
    inputs = make_inputs(case, dtype, device)
    plan = plan_of(inputs)
    pieces = {"sm90": 4, "sm80": 8}  # other kernels have none
    assert {item.num_splits for item in plan.items()} == {pieces.get(kernel, 1)} and plan.num_items == 20 * 8
    expected = run(inputs)
    for index in (0, 11, 19):
        rows, _ = inputs.bounds()[index]
        alone = inputs.sequence(index)
        assert_matches_oracle(alone, *run(alone))
        assert_same(run(alone), (expected[0][rows], expected[1][:, rows]))
    for _ in range(20):
        assert_same(attend(inputs, plan=plan), expected)
    out, lse = (x.clone() for x in expected)
    attend(inputs, plan=plan, out=out, lse=lse, accumulate=True)
    torch.testing.assert_close(out, expected[0], atol=0, rtol=2**-7)
    torch.testing.assert_close(lse, expected[1] + math.log(2), atol=1e-5, rtol=0)


def test_pieces_whose_keys_are_far_below_the_others(dtype: torch.dtype, device: str) -> None:
    """The largest logit of each row lies in one piece, which then decides alone."""
    for key in (0, 4999, 16_000):
        inputs = make_inputs(Case("peak", (20,), (17_000,), 2, False), dtype, device)
        inputs.k.mul_(0.1)
        inputs.k[key] *= 1000
        assert_matches_oracle(inputs, *run(inputs))


@pytest.mark.parametrize("heads", [66, 67, 132, 133])
def test_as_many_heads_as_have_pieces_and_one_more(heads: int, dtype: torch.dtype, device: str) -> None:
    check(make_inputs(Case("heads", (3,), (8200,), heads, False), dtype, device))


# ---- streams, devices, graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "on_the_fly"])
def test_runs_in_the_order_of_the_current_stream(planned: bool, device: str) -> None:
    """All inputs, the lengths too, arrive late on a stream that isn't the default one."""
    inputs = make_inputs(MIXED, torch.bfloat16, device)
    expected = run(inputs)
    names = ("q", "k", "v", "k_pe", "cu_seqlens_q", "cu_seqlens_k")
    late = inputs.map_tensors(torch.zeros_like, *names)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for name in names:
            getattr(late, name).copy_(getattr(inputs, name))
        result = attend(late, plan=plan_of(late) if planned else None)
        done.record()
    torch.cuda.current_stream().wait_event(done)
    assert_same(result, expected)


@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", ["q", "k", "v", "k_pe", "cu_seqlens_q", "cu_seqlens_k"])
def test_waits_for_a_kernel_that_lets_it_start(name: str, captured: bool, device: str) -> None:
    """CTAs may start long before the kernel before them has written what they read."""
    late_writer = pytest.importorskip("late_writer")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    inputs = make_inputs(MIXED, torch.bfloat16, device)
    expected, plan = run(inputs), plan_of(inputs)
    late = inputs.map_tensors(torch.zeros_like, name)

    def step() -> State:
        late_writer.copy(getattr(late, name), getattr(inputs, name))
        return attend(late, plan=plan)

    result = step()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
    getattr(late, name).zero_()
    if captured:
        graph.replay()
    else:
        result = step()
    assert_same(result, expected)


def test_does_not_wait_for_other_streams(device: str) -> None:
    inputs = make_inputs(MIXED, torch.bfloat16, device)
    expected = run(inputs)
    stream, blocked = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        attend(inputs)  # what it allocates is there from now on
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    blocked.record()
    with torch.cuda.stream(stream):
        result = attend(inputs)
    stream.synchronize()
    assert not blocked.query()
    torch.cuda.synchronize()
    assert_same(result, expected)


def test_streams_side_by_side(device: str) -> None:
    """Each call's own plan and scratch."""
    cases = (MIXED, LONG, SHORT)
    batches = [make_inputs(case, torch.bfloat16, device) for case in cases]
    expected = [run(inputs) for inputs in batches]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream, inputs in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                results.append(attend(inputs))
    torch.cuda.synchronize()
    for index, result in enumerate(results):
        assert_same(result, expected[index % len(cases)])


def test_never_waits_for_the_device(device: str) -> None:
    """By torch's account, and by the clock: the device is still at what came before when all calls are back."""
    inputs = make_inputs(MIXED, torch.bfloat16, device)
    joined = inputs.with_joined_k()

    def step() -> None:
        plan = plan_of(inputs)
        out, lse = attend(inputs, plan=plan)
        attend(joined, plan=plan)
        attend(inputs, out=out, lse=lse, accumulate=True)
        mla_prefill.ragged_prefill(**inputs.kwargs())

    step()  # loads the kernels, grows torch's memory pool
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP)
        step()
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_runs_on_the_device_of_its_tensors(kernel: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    expected = run(make_inputs(MIXED, torch.bfloat16, "cuda:0"))
    inputs = make_inputs(MIXED, torch.bfloat16, "cuda:1")
    result = run(inputs, plan=plan_of(inputs))
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in result)
    assert_same(tuple(x.to("cuda:0") for x in result), expected)
    with pytest.raises(RuntimeError, match=r"^k: expected q's device, cuda:1, got cuda:0"):
        attend(replace(inputs, k=inputs.k.to("cuda:0")))


@pytest.mark.parametrize("planned", ["inside", "outside", "on_the_fly"])
def test_graph_replays_with_new_lengths(planned: str, device: str) -> None:
    """New tokens and a context pass folded in. The plan is a part of the graph, or a tensor renewed in place."""
    rows, keys = 700, 3000
    own = make_inputs(Case("own", (rows,), (keys,), 4, True), torch.bfloat16, device)
    lens = [
        ((128, 1, 300, 40), (128, 900, 300, 500)),
        ((rows, 0, 0, 0), (keys, 0, 0, 0)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((1, 2, 3, 4), (128, 129, 0, 8)),
        ((175, 175, 175, 175), (750, 750, 750, 750)),
        ((128, 1, 300, 40), (128, 900, 300, 500)),
    ]
    own = replace(own, cu_seqlens_q=cu_seqlens(lens[0][0], device), cu_seqlens_k=cu_seqlens(lens[0][1], device))
    other = make_inputs(Case("other", (rows,), (keys,), 4, False), torch.bfloat16, device, seed=1)
    context = replace(other, q=own.q, cu_seqlens_q=own.cu_seqlens_q, cu_seqlens_k=own.cu_seqlens_k)
    out = torch.empty(own.out_shape, dtype=torch.bfloat16, device=device)
    lse = torch.empty(own.lse_shape, device=device)

    def step(plans: tuple[PrefillPlan | None, PrefillPlan | None]) -> None:
        attend(own, out=out, lse=lse, plan=plans[0])
        attend(context, out=out, lse=lse, plan=plans[1], accumulate=True)

    def new_plans() -> tuple[PrefillPlan, PrefillPlan]:
        return plan_of(own), plan_of(context)

    step(new_plans())
    outside = new_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step({"inside": new_plans, "outside": lambda: outside, "on_the_fly": lambda: (None, None)}[planned]())

    for index, (q_lens, kv_lens) in enumerate(lens):
        own.q.normal_(generator=torch.Generator(device).manual_seed(index))
        own.cu_seqlens_q.copy_(cu_seqlens(q_lens))
        own.cu_seqlens_k.copy_(cu_seqlens(kv_lens))
        results = []
        for replayed in (False, True):
            out.fill_(NAN)
            lse.fill_(NAN)
            if not replayed:
                step((None, None))
            else:
                if planned == "outside":
                    for held, new in zip(outside, new_plans(), strict=True):
                        held.tensor.copy_(new.tensor)
                graph.replay()
            results.append((out.clone(), lse.clone()))
        assert_same(*results)
        total = sum(q_lens)
        assert not out[:total].isnan().any() and out[total:].isnan().all() and lse[:, total:].isnan().all()


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def test_compiles_to_one_graph(device: str) -> None:
    pytest.importorskip("triton")

    def step(q, k, v, k_pe, cu_q, cu_k):
        plan = plan_prefill(cu_q, cu_k, num_heads=q.shape[1], causal=True, dtype=q.dtype, max_tokens_q=q.shape[0])
        options = {"scale": 0.1, "k_pe": k_pe}
        out, lse = mla_prefill.ragged_prefill(
            q * 2, k, v, cu_q, cu_k, causal=True, plan=plan, return_lse=True, **options
        )
        mla_prefill.ragged_prefill(q, k, v, cu_q, cu_k, causal=False, out=out, lse=lse, accumulate=True, **options)
        return out + 1, lse

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for size in (5, 70, 300):
        inputs = make_inputs(
            Case("step", (size, 3), (2 * size, 9), 4, True), torch.bfloat16, device, layout="projection"
        )
        arguments = (inputs.q, inputs.k, inputs.v, inputs.k_pe, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
        assert_same(compiled(*arguments), step(*arguments))


# ---- refusals --------------------------------------------------------------------------------------------------------

SMALL = Case("small", (4, 3), (6, 5), 2, True)


def outputs(inputs: Inputs) -> State:
    out = torch.full(inputs.out_shape, 7.0, dtype=inputs.out_dtype, device=inputs.device)
    return out, torch.full(inputs.lse_shape, 7.0, device=inputs.device)


@pytest.mark.parametrize(
    "dims",
    [
        *(dims for dims in HEAD_DIMS.values() if dims != MLA),
        (128, 64, 64),
        (128, 32, 128),
        (64, 128, 128),
        (96, 32, 128),
        (32, 96, 128),
        (128, 0, 64),
        (64, 0, 128),
    ],
    ids=str,
)
def test_other_head_dims_are_refused(dims: tuple[int, int, int], kernel: str, device: str) -> None:
    if kernel == "sm80" or (kernel == "sm90" and dims in HOPPER_DIMS):
        pytest.skip(f"the {kernel} kernel takes them")
    inputs = make_inputs(replace(SMALL, head_dims=dims), torch.bfloat16, device)
    assert_refused_by_kernel("head dims", inputs, *outputs(inputs))


@pytest.mark.parametrize("dims", [(256, 8, 128), (128, 64, 264), (100, 60, 128), (124, 68, 128), (64, 0, 65)], ids=str)
def test_head_dims_that_no_kernel_takes_are_refused(dims: tuple[int, int, int], device: str) -> None:
    inputs = make_inputs(replace(SMALL, head_dims=dims), torch.bfloat16, device)
    assert_refused_by_kernel("head dims", inputs, *outputs(inputs))


def test_other_dtypes_are_refused(device: str) -> None:
    inputs = make_inputs(SMALL, torch.float32, device)
    for other in (inputs, quantize(inputs)):
        message = assert_refused_by_kernel("q", other, *outputs(other))
        assert "bfloat16 or float16" in message


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.1, 1e-60])
def test_scales_that_are_not_above_0(scale: float, kernel: str, device: str) -> None:
    """As float32: 1e-60 is 0. Negative ones are turned around, and 0 makes all logits 0."""
    inputs = make_inputs(SMALL, torch.bfloat16, device, scale=scale)
    if kernel == "sm80":
        check(inputs)
        check(make_inputs(MIXED, torch.bfloat16, device, scale=scale))
    else:
        assert_refused_by_kernel("scale", inputs, *outputs(inputs))


@pytest.mark.parametrize("elements", [1, 4], ids=["2_bytes", "8_bytes"])
@pytest.mark.parametrize("what", ["base", "row_stride", "head_stride"])
@pytest.mark.parametrize("name", ["q", "k", "k_pe", "v", "out"])
def test_unaligned_tensors(name: str, what: str, elements: int, kernel: str, device: str) -> None:
    """An address or stride that isn't a multiple of 16 bytes is out of TMA's reach: refused by the tensor's name. The
    portable kernel has another way to load or store it, with the same bits."""
    if (name, what) == ("k_pe", "head_stride"):
        pytest.skip("k_pe has one head")
    inputs = make_inputs(MIXED if kernel == "sm80" else SMALL, torch.bfloat16, device)
    expected = run(inputs)
    out, lse = outputs(inputs)

    def unalign(x: torch.Tensor) -> torch.Tensor:
        strides = list(x.stride())
        if what == "head_stride":
            strides[1] += elements
            strides[0] = x.shape[1] * strides[1] + 8 - x.shape[1] * strides[1] % 8
        elif what == "row_stride":
            strides[0] += elements
        buffer = torch.full((8 + x.shape[0] * strides[0] + 8,), 7.0, dtype=x.dtype, device=device)
        moved = buffer.as_strided(x.shape, strides, elements if what == "base" else 8)
        moved.copy_(x)
        return moved

    if name == "out":
        out = unalign(out)
    else:
        inputs = inputs.map_tensors(unalign, name)
    if kernel == "sm80":
        attend(inputs, out=out, lse=lse)
        assert_same((out, lse), expected)
        return
    message = assert_refused_by_kernel(name, inputs, out, lse)
    assert "multiples of 16 bytes" in message


@pytest.mark.parametrize(
    "name",
    ["q", "k", "v", "k_pe", "cu_seqlens_q", "cu_seqlens_k", "out", "lse", "plan"],
    ids=lambda name: f"{name}_on_cpu",
)
def test_a_tensor_on_the_host_is_refused(name: str, device: str) -> None:
    """And the other way round: one on the GPU among tensors of the host."""
    inputs = make_inputs(SMALL, torch.bfloat16, device)
    out, lse = outputs(inputs)
    on_gpu = {**inputs.kwargs(), "out": out, "lse": lse, "plan": plan_of(inputs)}

    def to_cpu(x: object) -> object:
        if isinstance(x, PrefillPlan):
            return replace(x, tensor=x.tensor.cpu())
        return x.cpu() if isinstance(x, torch.Tensor) else x

    on_cpu = {key: to_cpu(value) for key, value in on_gpu.items()}
    for arguments, odd, usual, found in ((on_gpu, on_cpu, "cuda:0", "cpu"), (on_cpu, on_gpu, "cpu", "cuda:0")):
        blamed, expected, got = (name, usual, found) if name != "q" else ("k", found, usual)
        with pytest.raises(RuntimeError, match=rf"^{blamed}: expected q's device, {expected}, got {got}"):
            mla_prefill.ragged_prefill(**{**arguments, name: odd[name]})
    torch.cuda.synchronize()
    assert (out == 7).all() and (lse == 7).all()


def test_a_plan_needs_both_cu_seqlens_on_one_device(device: str) -> None:
    bounds = int32([0, 4, 7]), int32([0, 6, 11], device)
    for q, k in (bounds, bounds[::-1]):
        with pytest.raises(RuntimeError, match=r"^cu_seqlens_k: expected cu_seqlens_q's device, c.*, got c"):
            plan_prefill(q, k, num_heads=2, causal=True, max_tokens_q=7)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(10, dtype=torch.int32), "plan: expected at least 2072 entries, got 10"),
        (torch.zeros(16, dtype=torch.int64), "plan: expected int32, got int64"),
        (torch.zeros(2, 16, dtype=torch.int32), r"plan: expected a dense vector .*\[2, 16\]"),
        (torch.zeros(64, dtype=torch.int32)[::2], r"plan: expected a dense vector .*\[2\]"),
    ],
    ids=["short", "int64", "matrix", "strided"],
)
def test_a_tensor_that_is_no_plan_is_refused(tensor: torch.Tensor, message: str, device: str) -> None:
    inputs = make_inputs(SMALL, torch.bfloat16, device)
    on_gpu = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()
    out, lse = outputs(inputs)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        attend(inputs, plan=PrefillPlan(on_gpu, SMALL.num_heads, SMALL.causal, MLA), out=out, lse=lse)
    torch.cuda.synchronize()
    assert (out == 7).all() and (lse == 7).all()


@pytest.mark.parametrize(
    "changes",
    [{"num_heads": 3}, {"causal": False}, {"head_dims": (64, 64, 128)}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_plan_for_another_layer_is_refused(changes: dict[str, object], device: str) -> None:
    inputs = make_inputs(SMALL, torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"^plan: expected one made for"):
        attend(inputs, plan=replace(plan_of(inputs), **changes))


# ---- compute-sanitizer -----------------------------------------------------------------------------------------------


@pytest.mark.sanitizer
@pytest.mark.parametrize("split_k", [True, False], ids=["split_k", "joined_k"])
@pytest.mark.parametrize(
    "case",
    [
        Case("short", (1, 64, 65, 0, 3), (128, 64, 65, 7, 0), 3, True),
        Case("long", (1, 129, 130), (129, 257, 600), 2, True),
        Case("narrow", (1, 129, 5), (129, 600, 7), 2, True, (64, 64, 128)),
        Case("wide", (1, 129, 5), (129, 300, 7), 2, True, (192, 64, 256)),
        Case("full", (33, 5, 128), (300, 0, 40), 2, False),
        Case("split", (3, 70, 5), (8200, 17000, 20), 2, False),
    ],
    ids=str,
)
def test_under_the_sanitizer(case: Case, split_k: bool, device: str) -> None:
    """Small, and without other kernels of torch, for compute-sanitizer with memcheck, racecheck and synccheck:

        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
            python -m pytest -m sanitizer -q

    Without torch's memory pool each tensor is an allocation of its own, so a read past its end is seen.
    """
    inputs = make_inputs(case, torch.bfloat16, layout="projection", split_k=split_k)
    on_gpu = inputs.map_tensors(lambda x: x.to(device), "q", "k", "v", "k_pe", "cu_seqlens_q", "cu_seqlens_k")
    out = torch.full(inputs.out_shape, NAN, dtype=torch.bfloat16).to(device)
    lse = torch.full(inputs.lse_shape, NAN).to(device)
    plan = plan_of(on_gpu)
    attend(on_gpu, out=out, lse=lse, plan=plan)
    once = out.cpu(), lse.cpu()
    assert_matches_oracle(inputs, *once)
    attend(on_gpu, out=out, lse=lse, accumulate=True)
    assert torch.isneginf(once[1]).equal(torch.isneginf(lse.cpu()))
    attend(on_gpu, out=out, lse=lse, plan=plan)
    assert_same((out.cpu(), lse.cpu()), once)


@pytest.mark.sanitizer
@pytest.mark.parametrize("batch", [300, 1100])
def test_plan_under_the_sanitizer(batch: int, kernel: str) -> None:
    """In one launch and in three."""
    assert_host_plans_the_same(kernel, *random_lens(batch, seed=batch), 2, True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("padding", [0, 3], ids=["packed", "unaligned"])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 576), (torch.float8_e4m3fn, 576), (torch.uint8, 656)],
    ids=["plain", "fp8_e4m3", "fp8_ds_mla"],
)
def test_gather_under_the_sanitizer(dtype: torch.dtype, width: int, padding: int, device: str) -> None:
    """The last row of the cache and of the output end their allocations."""
    rows = torch.randint(1, 100, (3, 5, width + padding), generator=torch.Generator().manual_seed(0))
    whole = rows.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else rows.to(dtype)
    cache = whole[..., padding:]
    table, bounds, starts = int32([2, 0, 1]).reshape(1, 3), int32([0, 12]), int32([3])
    expected = torch.zeros(12, 576, dtype=torch.bfloat16)
    mla_prefill.gather_latent(cache, table, bounds, starts, out=expected)
    on_gpu = [whole.to(device)[..., padding:], *(x.to(device) for x in (table, bounds, starts))]
    out = torch.zeros(12, 576, dtype=torch.bfloat16).to(device)
    mla_prefill.gather_latent(*on_gpu, out=out)
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))


@pytest.mark.sanitizer
@pytest.mark.parametrize("dim", [128, 7], ids=["packed", "unaligned"])
def test_merge_under_the_sanitizer(dim: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(9, 5, dim, generator=generator).bfloat16() for _ in range(2)]
    lses = [torch.randn(5, 9, generator=generator) for _ in range(2)]
    lses[1][:, 4] = -INF
    expected_out, expected_lse = mla_prefill.merge_states(outs[0], lses[0], outs[1], lses[1])
    out, lse, other_out, other_lse = (x.to(device) for x in (outs[0], lses[0], outs[1], lses[1]))
    mla_prefill.merge_states(out, lse, other_out, other_lse, out=out, lse=lse)
    torch.testing.assert_close(out.cpu(), expected_out)
    torch.testing.assert_close(lse.cpu(), expected_lse)
