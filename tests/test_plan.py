"""The work plan: covers every row of every head once, in a good order, within a bound known beforehand."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, MLA, Case
from helpers import cu_seqlens, int32, make_inputs, run

import mla_prefill
from mla_prefill import PrefillPlan, plan_prefill
from mla_prefill.plan import WorkItem

HEADER_INTS, ITEMS_BEGIN, ITEM_INTS = 24, 2072, 8
UNEVEN = Case("uneven", (300, 1, 0, 64, 5, 700, 129), (300, 4000, 50, 0, 2, 700, 131), 5, True)


def random_case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def lens(count: int, high: int) -> tuple[int, ...]:
        values = torch.randint(1, high, (count,), generator=generator)
        return tuple((values * (torch.rand(count, generator=generator) > 0.2)).tolist())

    count = int(torch.randint(1, 30, (), generator=generator))
    return Case(f"random_{seed}", lens(count, 700), lens(count, 5000), 1 + seed % 17, bool(seed % 2))


PLANNED = [UNEVEN, *CASES, *(random_case(seed) for seed in range(20))]


def plan_of(case: Case, device: str = "cpu", start: int = 0, **options: object) -> PrefillPlan:
    return plan_prefill(
        cu_seqlens(case.q_lens, device, start),
        cu_seqlens(case.kv_lens, device, start),
        num_heads=case.num_heads,
        causal=case.causal,
        head_dims=case.head_dims,
        **options,
    )


# ---- what is in it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_every_row_of_every_head_exactly_once(case: Case, device: str) -> None:
    """With all the keys that the item's last row sees, in one item or in parts that follow on each other."""
    covered = [torch.zeros(len_q, case.num_heads, dtype=torch.int64) for len_q in case.q_lens]
    parts: dict[tuple[int, ...], list[WorkItem]] = {}
    for item in plan_of(case, device).items():
        key = (item.seq, item.q_begin, item.q_rows, item.head_begin, item.head_count)
        parts.setdefault(key, []).append(item)
    for (seq, q_begin, q_rows, head_begin, head_count), items in parts.items():
        len_q, len_k = case.q_lens[seq], case.kv_lens[seq]
        assert 0 <= q_begin < q_begin + q_rows <= len_q
        assert 0 <= head_begin < head_begin + head_count <= case.num_heads
        covered[seq][q_begin : q_begin + q_rows, head_begin : head_begin + head_count] += 1

        items.sort(key=lambda item: item.kv_begin)
        visible = min(max(q_begin + q_rows + len_k - len_q, 0), len_k) if case.causal else len_k
        bounds = [0, *(item.kv_end for item in items)]
        assert [item.kv_begin for item in items] == bounds[:-1] and bounds[-1] == visible
    for counts in covered:
        assert (counts == 1).all()


@pytest.mark.parametrize("case", PLANNED[:25], ids=str)
def test_header(case: Case, device: str) -> None:
    plan = plan_of(case, device)
    header = plan.tensor[:HEADER_INTS].tolist()
    version, num_items, capacity, batch, num_heads, causal, tile_q, tile_kv = header[:8]
    assert plan.tensor.dtype == torch.int32 and plan.tensor.dim() == 1 and str(plan.tensor.device).startswith(device)
    assert plan.tensor.numel() == ITEMS_BEGIN + ITEM_INTS * capacity
    assert version >= 1 and tile_q > 0 and tile_kv > 0
    assert (batch, num_heads, bool(causal)) == (len(case.q_lens), case.num_heads, case.causal)
    assert num_items == plan.num_items == len(plan.items()) <= capacity == plan.capacity
    assert (plan.num_heads, plan.causal, plan.head_dims) == (case.num_heads, case.causal, case.head_dims)


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_longest_first(case: Case, device: str) -> None:
    """Sequences by the key tiles of their last rows and eight times those of their first, descending, to within the
    quarter octave that keeps neighbours together; in a sequence, tiles of the same heads by the keys they see."""
    plan = plan_of(case, device)
    items = plan.items()
    tile_q, tile_kv, first_short = plan.tensor[6:9].tolist()
    short = {item.seq for item in items[first_short:]}
    splits = {item.seq: item.num_splits for item in items}

    def work(seq: int) -> int:
        len_q, len_k = case.q_lens[seq], case.kv_lens[seq]
        if seq in short:
            return 0  # the end of the list
        if splits[seq] > 1:
            return 2**31 * splits[seq]  # its beginning
        first = min(max(min(tile_q, len_q) + len_k - len_q, 0), len_k) if case.causal else len_k
        return 8 * -(-first // tile_kv) + -(-len_k // tile_kv)

    most_behind = 0
    for seq in reversed(list(dict.fromkeys(item.seq for item in items))):
        most_behind = max(most_behind, work(seq))
        assert most_behind <= 1.25 * work(seq)
    last_keys: dict[tuple[int, int], int] = {}
    for item in items:
        key = (item.seq, item.head_begin)
        assert item.kv_end <= last_keys.get(key, item.kv_end)
        last_keys[key] = item.kv_end


def test_sequences_of_one_length_stay_in_memory_order(device: str) -> None:
    items = plan_of(Case("equal", (3,) * 50, (700,) * 50, 2, False), device).items()
    assert [item.seq for item in items] == sorted(item.seq for item in items)


def test_short_work_takes_several_heads_at_once(device: str) -> None:
    """A04/A17: many short sequences must not become one item per head; long ones must, to balance."""
    short = plan_of(Case("short", (1,) * 64, (5,) * 64, 16, True), device)
    assert short.num_items < 64 * 16
    long = plan_of(Case("long", (64,), (100_000,), 16, True), device)
    assert all(item.head_count == 1 for item in long.items())


def test_starts_above_zero_make_the_same_plan(device: str) -> None:
    assert plan_of(UNEVEN, device, start=1000).items() == plan_of(UNEVEN, device).items()


def test_no_sequence(device: str) -> None:
    for lens in ((), (0,), (0, 0, 0)):
        plan = plan_of(Case("empty", lens, lens, 3, True), device)
        assert plan.num_items == 0 and plan.items() == []


def test_host_planner_agrees() -> None:
    binding = pytest.importorskip("mla_prefill._C")
    for case in PLANNED[:30]:
        items = binding.plan_items(
            cu_seqlens(case.q_lens).tolist(),
            cu_seqlens(case.kv_lens).tolist(),
            case.num_heads,
            case.causal,
            *case.head_dims,
        )
        assert items == [tuple(vars(item).values()) for item in plan_of(case).items()]


@pytest.mark.parametrize(
    ("dims", "group"), [(MLA, 6), ((64, 64, 128), 8), ((128, 0, 128), 8), ((192, 64, 256), 4)], ids=str
)
def test_heads_in_a_group_follow_from_the_bytes_of_a_key(dims: tuple[int, int, int], group: int) -> None:
    """K and V of a group's heads fit 32 MiB: 8192 keys of 192 + 128, 128 + 128 or 256 + 256 elements."""
    binding = pytest.importorskip("mla_prefill._C")
    items = binding.plan_items([0, 256], [0, 8192], 16, True, *dims, backend="sm90")
    heads = [head for *_, head, head_count, _ in items if head_count == 1]
    assert heads[: 2 * group] == [*range(group), *range(group)] and len(heads) == len(items) == 2 * 16


def test_without_a_mask_heads_go_one_by_one() -> None:
    """All tiles of a head, then the next head, or the next few where an item has as many."""
    binding = pytest.importorskip("mla_prefill._C")
    for len_k, heads_of_item in ((8192, 1), (200, 2)):
        items = binding.plan_items([0, 256], [0, len_k], 4, False, *MLA, backend="sm90")
        first_heads = range(0, 4, heads_of_item)
        assert [(q_begin, head, count) for _, q_begin, *_, head, count, _ in items] == [
            (q_begin, head, heads_of_item) for head in first_heads for q_begin in (128, 0)
        ]


def test_wide_heads_have_no_short_tile() -> None:
    """With 256 columns of V all sequences take the tile of 128 query rows, on Hopper."""
    binding = pytest.importorskip("mla_prefill._C")
    for dims, rows in ((MLA, [64, 64]), ((192, 64, 256), [128])):
        items = binding.plan_items([0, 128], [0, 100], 1, False, *dims, backend="sm90")
        assert [item[2] for item in items] == rows


def test_host_planner_costs_grow_with_keys() -> None:
    binding = pytest.importorskip("mla_prefill._C")
    costs = [binding.item_cost(keys) for keys in (0, 1, 100, 1000, 10_000, 100_000)]
    assert costs[0] > 0 and costs == sorted(costs) and costs[-1] > 5 * costs[-2]


# ---- its size --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads", [1, 16])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_size_depends_on_max_tokens_and_batch_alone(batch: int, num_heads: int, device: str) -> None:
    """So that a captured graph replays with new lengths: the worst split of the rows must fit, whatever it is."""
    rows = 1000
    one_long = [rows - (batch - 1), *[1] * (batch - 1)]
    even = [rows // batch] * batch
    last_only = [0] * (batch - 1) + [rows]
    sizes = set()
    for q_lens in (one_long, even, last_only, [0] * batch):
        for kv_lens in ([0] * batch, [9000] * batch):
            case = Case("bound", tuple(q_lens), tuple(kv_lens), num_heads, False)
            plan = plan_of(case, device, max_tokens_q=rows)
            assert plan.num_items <= plan.capacity
            sizes.add(plan.tensor.numel())
    assert len(sizes) == 1


def test_equal_lengths_give_equal_plans_to_the_last_entry(device: str) -> None:
    """The room behind the items too: what compares an op's runs compares whole tensors."""
    expected = plan_of(UNEVEN, device, max_tokens_q=20_000).tensor
    for fill in range(5):
        used_before = [torch.full_like(expected, fill) for _ in range(4)]
        del used_before
        assert torch.equal(plan_of(UNEVEN, device, max_tokens_q=20_000).tensor, expected)


def test_a_plan_equals_itself_alone() -> None:
    """Plans are keys of a step's state, and comparing their tensors would wait for the device."""
    plan, same_lengths = plan_of(UNEVEN), plan_of(UNEVEN)
    assert plan == plan and plan != same_lengths
    assert len({plan, same_lengths, plan}) == 2 and {plan: 1}[plan] == 1


def test_max_tokens_below_the_rows_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"max_tokens_q: expected at least the 2000 query rows .*, got"):
        plan_of(Case("small", (2000,), (2000,), 4, True), max_tokens_q=10)


def test_hundred_thousand_sequences() -> None:
    """Each row of each head once. ``python -m benchmarks plan`` shows how the time grows."""
    batch, num_heads = 100_000, 16
    lens = [1 + i % 3 for i in range(batch)]
    q, k = cu_seqlens(lens), cu_seqlens([i * 37 % 600 for i in range(batch)])
    plan = plan_prefill(q, k, num_heads=num_heads, causal=True)
    items = plan.tensor[ITEMS_BEGIN:].view(-1, ITEM_INTS)[: plan.num_items].long()
    assert batch <= plan.num_items <= plan.capacity
    rows = torch.zeros(batch, dtype=torch.int64).index_add_(0, items[:, 0], items[:, 2] * items[:, 6])
    assert rows.tolist() == [num_heads * length for length in lens]


# ---- a plan made for something else ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lens": (300, 1, 0, 64, 6, 699, 129)}, "plan: expected a plan made for these cu_seqlens"),
        ({"kv_lens": (300, 4000, 50, 0, 2, 701, 131)}, "plan: expected a plan made for these cu_seqlens"),
        ({"q_lens": (0, 1, 0, 64, 5, 700, 129)}, "plan: expected"),
        ({"q_lens": (700, 1, 0, 64, 5, 300, 129)}, "plan: expected"),
        (
            {"q_lens": UNEVEN.q_lens[:-1], "kv_lens": UNEVEN.kv_lens[:-1]},
            "plan: expected a plan for a batch of 7, got 6",
        ),
        ({"num_heads": 4}, r"plan: expected .*num_heads.*5.* got .*4"),
        ({"causal": False}, r"plan: expected .*causal.* got"),
        ({"head_dims": (64, 64, 128)}, r"plan: expected .*qk_head_dim.*192.* got .*128"),
        ({"head_dims": (128, 64, 64)}, r"plan: expected .*v_head_dim.*128.* got .*64"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_a_stale_plan_is_refused(changes: dict[str, object], message: str) -> None:
    inputs = make_inputs(UNEVEN, torch.bfloat16)
    plan = plan_of(Case(**{**vars(UNEVEN), **changes}))
    out, lse = torch.full(inputs.out_shape, 7.0, dtype=torch.bfloat16), torch.full(inputs.lse_shape, 7.0)
    with pytest.raises((RuntimeError, ValueError), match=message):
        mla_prefill.ragged_prefill(**inputs.kwargs(), plan=plan, out=out, lse=lse)
    assert (out == 7).all() and (lse == 7).all()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(10, dtype=torch.int32), "plan: expected at least this many entries: 2072, got 10"),
        (torch.zeros(ITEMS_BEGIN, dtype=torch.int32), "plan: expected version"),
        (
            torch.zeros(2, 16, dtype=torch.int32),
            r"plan: expected a dense vector made by plan_prefill, got shape \[2, 16\]",
        ),
        (torch.zeros(16, dtype=torch.int64), "plan: expected int32, got int64"),
    ],
    ids=["short", "no_version", "matrix", "int64"],
)
def test_a_tensor_that_is_no_plan_is_refused(tensor: torch.Tensor, message: str) -> None:
    inputs = make_inputs(UNEVEN, torch.bfloat16)
    with pytest.raises(RuntimeError, match=message):
        run(inputs, plan=PrefillPlan(tensor, UNEVEN.num_heads, UNEVEN.causal, MLA))


def test_a_corrupt_item_is_refused() -> None:
    """No item is trusted: one out of range would write past a tensor."""
    inputs = make_inputs(UNEVEN, torch.bfloat16)
    for field, value in (
        (0, 7),
        (0, -1),
        (1, 100_000),
        (1, -1),
        (2, 2**31 - 1),
        (4, 5000),
        (5, 5),
        (6, 6),
        (6, 2**31 - 1),
    ):
        plan = plan_of(UNEVEN)
        plan.tensor[ITEMS_BEGIN + field] = value
        with pytest.raises(RuntimeError, match="plan: expected"):
            run(inputs, plan=plan)


def test_int32_cu_seqlens_at_any_offset(device: str) -> None:
    expected = plan_of(UNEVEN, device).items()
    bounds = cu_seqlens(UNEVEN.q_lens).tolist(), cu_seqlens(UNEVEN.kv_lens).tolist()
    for shift in range(1, 4):
        q, k = (int32([0] * shift + values, device)[shift:] for values in bounds)
        plan = plan_prefill(q, k, num_heads=UNEVEN.num_heads, causal=True, head_dims=UNEVEN.head_dims)
        assert plan.items() == expected
