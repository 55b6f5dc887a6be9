"""Trace, scheduler and replay."""

from __future__ import annotations

import gzip
import json
import math
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_prefill import layer as layer_module
from mla_prefill.backends import native
from mla_prefill.cli import trace as trace_module
from mla_prefill.cli.replay import ReplayConfig, replay
from mla_prefill.cli.scheduler import Scheduler, Step
from mla_prefill.cli.trace import TRACE_BLOCK, Request, TraceError, read_trace

# ---- trace -----------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def record(**changes: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [7, 8], **changes}


def numeral(**field: str) -> str:
    """A record with a value that is written so."""
    [(name, text)] = field.items()
    return json.dumps(record(**{name: "HERE"})).replace('"HERE"', text)


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth > 1 else []


def test_trace_is_sorted_by_arrival_and_limited(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "trace.jsonl",
        record(timestamp=5, output_length=1),
        "",
        record(timestamp=3, output_length=2),
        record(timestamp=3, output_length=3, input_length=100, hash_ids=[1]),
        record(timestamp=0, output_length=4),
    )
    assert [request.output_length for request in read_trace(trace)] == [4, 2, 3, 1]
    assert [request.output_length for request in read_trace(trace, 2)] == [2, 1]
    assert [request.output_length for request in read_trace(trace, 2, max_length=100)] == [3]
    assert read_trace(trace)[0] == Request(0, 600, 4, (7, 8))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: expected a JSON object, got '\{'"),
        ("[1, 2]", r":2: expected a JSON object, got \[1, 2\]"),
        ("[" * 100_000, r":2: expected a JSON object, got '\[+\.\.\.\[+' \(maximum recursion depth"),
        ('{"a":' * 100_000, r":2: expected a JSON object, got .* \(maximum recursion depth"),
        ("null", r":2: expected a JSON object, got None$"),
        ("1" * 5000, r":2: expected a JSON object, got '1+\.\.\.1+'$"),
        ('{"timestamp": 0\0}', r":2: expected a JSON object, got .*\\x00"),
        ({"timestamp": 1}, r":2: input_length: expected an integer from 1 to 2147483647, got no such field"),
        (record(timestamp="now"), r":2: timestamp: expected a finite number >= 0, got 'now'"),
        (record(timestamp=-0.5), r":2: timestamp: expected a finite number >= 0, got -0.5"),
        (record(timestamp=math.nan), r":2: timestamp: expected a finite number >= 0, got nan"),
        (record(timestamp=-math.inf), r":2: timestamp: expected a finite number >= 0, got -inf"),
        (numeral(timestamp="1e999"), r":2: timestamp: expected a finite number >= 0, got inf"),
        (record(timestamp=False), r":2: timestamp: expected a finite number >= 0, got False"),
        (numeral(timestamp="1" * 5000), r":2: timestamp: expected a finite number >= 0, got '1+\.\.\.1+'$"),
        (record(input_length=0), r":2: input_length: expected an integer from 1 to 2147483647, got 0"),
        (record(input_length=6.5), r":2: input_length: expected an integer from 1 to 2147483647, got 6.5"),
        (numeral(input_length="1e3"), r":2: input_length: expected an integer from 1 to 2147483647, got 1000.0"),
        (record(input_length=10**18), r":2: input_length: expected an integer from 1 to 2147483647, got 10+$"),
        (numeral(input_length="9" * 4001), r":2: input_length: expected an integer .*, got 9+\.\.\.9+$"),
        (record(input_length=2**31 - 1), r":2: hash_ids: expected 4194304 ids .*, got 2"),
        (record(output_length=True), r":2: output_length: expected an integer >= 0, got True"),
        (numeral(output_length="-" + "1" * 5000), r":2: output_length: expected an integer >= 0, got '-1+\.\.\.1+'$"),
        (record(hash_ids=5), r":2: hash_ids: expected a list of integers, got 5"),
        (record(hash_ids=[1, "x"]), r":2: hash_ids: expected a list of integers, got \[1, 'x'\]"),
        (record(hash_ids=[1]), r":2: hash_ids: expected 2 ids \(one per 512 of 600 tokens\), got 1"),
        (record(hash_ids=["x" * 100]), r"got \['x+\.\.\.x+\.\.\.$"),
        (record(hash_ids=[1.0, 2]), r":2: hash_ids: expected a list of integers, got \[1.0, 2\]"),
        (numeral(hash_ids=f"[7, {'1' * 5000}]"), r":2: hash_ids: expected a list of integers, got \[7, '1+"),
        (record(hash_ids=nested(700)), r":2: hash_ids: expected a list of integers, got \[\[+\.\.\.\]+$"),
    ],
    ids=lambda value: repr(value)[:80],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    trace = write(tmp_path / "trace.jsonl", record(), line)
    with pytest.raises(TraceError, match=message) as error:
        read_trace(trace)
    assert str(error.value).startswith(str(trace))


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(map(json.dumps, [record()] * 2)).encode("utf-16"),
        "\n".join(map(json.dumps, [record()] * 2)).encode("utf-16-le"),
        gzip.compress(json.dumps(record()).encode()),
        json.dumps(record(note="café"), ensure_ascii=False).encode("latin-1"),
        b"\0" * 100,
    ],
    ids=["utf-16", "utf-16 without a mark", "gzip", "latin-1", "zeros"],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: expected a JSON object, got '"):
        read_trace(path)


def test_a_file_without_lines_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_MAX_LINE", 1000)
    with pytest.raises(TraceError, match=r"/dev/zero:1: expected at most 1,000 bytes, got a longer line"):
        read_trace(Path("/dev/zero"))


def test_what_published_traces_hold_is_taken(tmp_path: Path) -> None:
    """A byte order mark, floats for timestamps, any integers for hash ids, other line ends, fields of their own."""
    lines = [
        record(timestamp=27.5, output_length=1),
        record(timestamp=27, output_length=2, hash_ids=[-1, 2**300]),
        record(timestamp=1e-3, output_length=3, model="é", nested={"a": [1.5, None]}),
        record(timestamp=27.25, output_length=4, input_length=1, hash_ids=[0]),
        '{"timestamp": 99, ' + json.dumps(record(timestamp=27.75, output_length=5))[1:],  # the last one counts
    ]
    path = write(tmp_path / "trace.jsonl", *lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    requests = read_trace(path)
    assert [request.output_length for request in requests] == [3, 2, 4, 1, 5]
    assert [request.timestamp for request in requests] == [1e-3, 27, 27.25, 27.5, 27.75]
    assert replay(requests, ReplayConfig(tp=16, verify=1)).verification.passed


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="expected at least one request, got none"):
        read_trace(write(tmp_path / "trace.jsonl"))
    with pytest.raises(TraceError, match="expected at least one request of at most 10 tokens, got none"):
        read_trace(write(tmp_path / "trace.jsonl", record()), max_length=10)


def test_the_packaged_sample_is_whole() -> None:
    sample = resources.files("mla_prefill") / "data" / "mooncake_sample.jsonl"
    with resources.as_file(sample) as path:
        requests = read_trace(path)
    assert len(requests) == 200
    assert max(request.input_length for request in requests) == 120633


# ---- scheduler -------------------------------------------------------------------------------------------------------


class CacheModel:
    """What the paged cache holds after each step. A token's content is its hash block and its position there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.block_size
        self.content: dict[int, tuple[int, int]] = {}  # slot -> content
        self.computed: dict[int, list[tuple[int, int]]] = {}  # request -> the ranges that steps computed
        self.written: set[tuple[int, int]] = set()  # contents computed so far

    def expected(self, request: Request, position: int) -> tuple[int, int]:
        return request.hash_ids[position // TRACE_BLOCK], position % TRACE_BLOCK

    def slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, step: Step) -> None:
        before = set(self.written)
        for entry in step.requests:
            request = entry.request
            assert entry.tokens > 0
            assert len(entry.blocks) == -(-request.input_length // self.block_size)
            for position in range(entry.context):
                assert self.content[self.slot(entry.blocks, position)] == self.expected(request, position)
            ranges = self.computed.setdefault(entry.index, [])
            if ranges:
                assert entry.context == ranges[-1][1], "each token is computed once"
            else:
                self.check_hit(request, entry.context, before)
            ranges.append((entry.context, entry.context + entry.tokens))
        for entry in step.requests:
            for position in range(entry.context, entry.context + entry.tokens):
                content = self.expected(entry.request, position)
                self.content[self.slot(entry.blocks, position)] = content
                self.written.add(content)
            assert all(self.scheduler.pool.users(block) > 0 for block in entry.blocks)

    def check_hit(self, request: Request, hit: int, before: set[tuple[int, int]]) -> None:
        assert hit < request.input_length and hit % self.block_size == 0
        if self.scheduler.pool.evictions == 0:
            shared = 0
            while shared < request.input_length and self.expected(request, shared) in before:
                shared += 1
            assert hit == min(shared, request.input_length - 1) // self.block_size * self.block_size


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Requests whose hash ids come from a tree of prefixes, so that they share some and repeat others."""
    requests: list[Request] = []
    for index in range(draw(st.integers(1, 8))):
        shared: tuple[int, ...] = ()
        if requests and draw(st.booleans()):
            parent = draw(st.sampled_from(requests))
            shared = parent.hash_ids[: draw(st.integers(0, len(parent.hash_ids)))]
        full_blocks = draw(st.integers(0, 2))
        length = TRACE_BLOCK * (len(shared) + full_blocks) + draw(st.integers(0, TRACE_BLOCK - 1))
        length = max(length, 1)
        ids = shared + tuple(100 * index + i for i in range(3))
        requests.append(Request(index, length, 1, ids[: -(-length // TRACE_BLOCK)]))
    return requests


@given(
    requests=traces(),
    budget=st.sampled_from([1000, 130, 512, 2048]),
    block_size=st.sampled_from([16, 64, 128, 512]),
    spare=st.sampled_from([0, 1, 5, 1000]),
)
def test_any_schedule(requests: list[Request], budget: int, block_size: int, spare: int) -> None:
    longest = max(-(-request.input_length // block_size) for request in requests)
    scheduler = Scheduler(requests, budget=budget, block_size=block_size, cache_tokens=(longest + spare) * block_size)
    cache = CacheModel(scheduler)
    order = []
    for step in scheduler.steps():
        assert 0 < step.num_tokens <= budget
        cache.run(step)
        order += [entry.index for entry in step.requests if entry.index not in order]
    assert order == list(range(len(requests))), "first come, first served"
    assert scheduler.admitted == len(requests)
    new = sum(end - begin for ranges in cache.computed.values() for begin, end in ranges)
    assert new + scheduler.hit_tokens == sum(request.input_length for request in requests)
    assert all(ranges[-1][1] == requests[index].input_length for index, ranges in cache.computed.items())
    assert scheduler.pool.available == longest + spare, "every block is free again or cached"


def schedule(requests: list[Request], **sizes: int) -> list[list[tuple[int, int, int]]]:
    scheduler = Scheduler(requests, **{"budget": 2048, "block_size": 64, "cache_tokens": 65536, **sizes})
    return [[(e.index, e.context, e.tokens) for e in step.requests] for step in scheduler.steps()]


def test_long_prompts_are_cut_and_short_ones_fill_the_step() -> None:
    requests = [Request(0, 1500, 1, (1, 2, 3)), Request(0, 700, 1, (4, 5)), Request(0, 100, 1, (6,))]
    assert schedule(requests, budget=1000) == [
        [(0, 0, 1000)],
        [(0, 1000, 500), (1, 0, 500)],
        [(1, 500, 200), (2, 0, 100)],
    ]


def test_the_last_token_is_always_computed() -> None:
    """An identical prompt hits all full blocks but the one with the last token."""
    twice = [Request(0, 1024, 1, (1, 2))] * 2
    assert schedule(twice, budget=1024) == [[(0, 0, 1024)], [(1, 960, 64)]]
    assert schedule(twice, budget=1024, block_size=512) == [[(0, 0, 1024)], [(1, 512, 512)]]
    twice = [Request(0, 1000, 1, (1, 2))] * 2
    assert schedule(twice, budget=1000) == [[(0, 0, 1000)], [(1, 960, 40)]]


def test_a_prefix_is_hit_only_once_computed() -> None:
    same = [Request(0, 600, 1, (1, 2))] * 3
    assert schedule(same, budget=1200) == [[(0, 0, 600), (1, 0, 600)], [(2, 576, 24)]]
    # Of a prompt that is still running, what it has computed so far counts.
    assert schedule([Request(0, 1536, 1, (1, 2, 3)), Request(0, 1536, 1, (1, 2, 9))], budget=1100) == [
        [(0, 0, 1100)],
        [(0, 1100, 436), (1, 1024, 512)],
    ]


def test_least_recently_used_blocks_go_first_and_prefixes_last() -> None:
    def request(*ids: int) -> Request:
        return Request(0, 512 * len(ids), 1, ids)

    requests = [request(1, 2), request(3, 4), request(1, 9), request(5, 6), request(1, 7), request(3, 8)]
    # Six blocks: 1 2 3 4 fill four, 9 and 5 the others, 6 evicts 2, the deepest of the oldest, and 7 evicts 4.
    assert schedule(requests, budget=1024, block_size=512, cache_tokens=3072) == [
        [(0, 0, 1024)],
        [(1, 0, 1024)],
        [(2, 512, 512), (3, 0, 512)],
        [(3, 512, 512), (4, 512, 512)],
        [(5, 512, 512)],
    ]


def test_a_block_that_two_requests_compute_at_once_is_cached_once() -> None:
    requests = [Request(0, 1024, 1, ids) for ids in ((1, 2), (1, 2), (3, 4), (5, 6), (1, 2))]
    scheduler = Scheduler(requests, budget=2048, block_size=512, cache_tokens=2048)
    cache = CacheModel(scheduler)
    for step in scheduler.steps():
        cache.run(step)
    # The second copies of 1 and 2 were free for 3 and 4; 5 and 6 evicted 2 and 1, so the last request hits nothing.
    assert (scheduler.hit_tokens, scheduler.pool.evictions) == (0, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"budget": 0}, "budget: expected at least 1 token per step, got 0"),
        ({"block_size": 48}, "block_size: expected a divisor of the trace's block of 512, got 48"),
        ({"cache_tokens": 639}, "cache_tokens: expected room for the longest prompt of 600 tokens, got 9 blocks of 64"),
    ],
)
def test_the_scheduler_names_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule([Request(0, 600, 1, (1, 2))], **sizes)


# ---- replay ----------------------------------------------------------------------------------------------------------

TINY = [
    Request(0, 300, 1, (1,)),
    Request(0, 1100, 1, (1, 2, 3)),
    Request(0, 1100, 1, (1, 2, 4)),
    Request(0, 20, 1, (9,)),
]
CONFIG = ReplayConfig(tp=8, budget=512, workspace_rows=256, verify=6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_replay_agrees_with_the_oracle(dtype: str) -> None:
    seen = []
    report = replay(TINY, ReplayConfig(**{**vars(CONFIG), "dtype": dtype}), lambda report: seen.append(report.steps))
    assert seen == list(range(1, report.steps + 1))
    assert report.verification.passed and report.verification.samples == 6 * report.steps
    assert 0 < report.verification.error <= report.verification.tolerance
    assert report.requests == 4
    assert report.new_tokens + report.cached_tokens == sum(request.input_length for request in TINY)
    assert report.cached_tokens == 704  # of the third prompt, in full blocks: the second one ran ahead by 724 tokens
    assert report.hit_rate == report.cached_tokens / 2520
    assert report.chunks > report.steps, "this workspace should need several chunks a step"
    assert report.scale == pytest.approx(0.114721, rel=5e-6)
    assert report.workspace_bytes == 256 * 576 * (4 if dtype == "float32" else 2)
    assert set(report.seconds) == {"write_cache", "gather", "projection", "attention"}
    assert 0 < sum(report.seconds.values()) <= report.layer_seconds <= report.total_seconds
    assert report.tokens_per_second > 0 and report.gflops["attention"] > 0


def test_flops_count_what_is_visible() -> None:
    report = replay([Request(0, 700, 1, (1, 2))], ReplayConfig(tp=8, budget=512, verify=0))
    pairs = 700 * 701 // 2
    assert report.attention_flops == 2 * pairs * 2 * (192 + 128)
    assert report.projection_flops == 2 * (700 + 512) * 512 * 2 * 256
    assert (report.steps, report.context_rows) == (2, 512)
    assert report.verification.samples == 0 and report.verification.passed


def test_max_steps() -> None:
    report = replay(TINY, ReplayConfig(**{**vars(CONFIG), "max_steps": 2}))
    assert (report.steps, report.new_tokens) == (2, 1024)


def test_a_cache_that_evicts_is_still_right() -> None:
    requests = [Request(0, 1000, 1, (i % 3, 10 + i)) for i in range(8)]
    report = replay(requests, ReplayConfig(**{**vars(CONFIG), "cache_tokens": 1536, "budget": 1024}))
    assert report.evictions > 0 and report.verification.passed


def wrong_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.ragged_prefill

    def planted(q, k, v, *args, **kwargs):
        return real(1.05 * q, k, v, *args, **kwargs)

    monkeypatch.setattr(native, "ragged_prefill", planted)


def wrong_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request reads its neighbour's context."""
    real = layer_module.gather_latent
    monkeypatch.setattr(
        layer_module, "gather_latent", lambda cache, table, *args, **kwargs: real(cache, table.flip(1), *args, **kwargs)
    )


def lost_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.NativePrefillBackend, "accumulate_context_chunk", lambda self, **arguments: None)


def not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.ragged_prefill
    monkeypatch.setattr(native, "ragged_prefill", lambda q, *args, **kwargs: real(q * torch.nan, *args, **kwargs))


@pytest.mark.parametrize("plant", [wrong_attention, wrong_gather, lost_context, not_a_number])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch, plant, dtype: str) -> None:
    plant(monkeypatch)
    report = replay(TINY, ReplayConfig(**{**vars(CONFIG), "dtype": dtype}))
    check = report.verification
    assert not check.passed and check.failures > 0
    assert check.error > check.tolerance and check.where.startswith("step ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-2"}, "model: expected one of"),
        ({"tp": 3}, "tp: expected a divisor of the 16 heads, got 3"),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        ({"device": "foo"}, "device: expected cpu.*, got 'foo'"),
        ({"device": "meta"}, "device: expected cpu.*, got 'meta'"),
        ({"device": "cuda:99"}, "device: expected cpu.*, got 'cuda:99'"),
        ({"device": ""}, "device: expected cpu.*, got ''"),
        ({"verify": -1}, "verify: expected 0 to 100,000, got -1"),
        ({"verify": 10**9}, "verify: expected 0 to 100,000, got 1000000000"),
        ({"workspace_rows": 0}, "workspace_rows: expected at least 1, got 0"),
        ({"block_size": 0}, "block_size: expected a divisor of the trace's block of 512, got 0"),
        (
            {"cache_tokens": 640},
            "cache_tokens: expected room for the longest prompt of 1100 tokens, got 10 blocks of 64",
        ),
    ],
)
def test_replay_names_a_wrong_setting(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(TINY, ReplayConfig(**{**vars(CONFIG), **change}))


@pytest.mark.parametrize("seed", [-1, 2**63, -(10**30), 10**4000])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert replay(TINY, ReplayConfig(**{**vars(CONFIG), "seed": seed, "max_steps": 1})).verification.passed


@pytest.mark.parametrize("sizes", [{"cache_tokens": 10**30}, {"workspace_rows": 10**30}, {"budget": 10**30}])
def test_sizes_beyond_the_trace_cost_nothing(sizes: dict[str, int]) -> None:
    report = replay(TINY, ReplayConfig(**{**vars(CONFIG), **sizes}))
    row_bytes = 2 * 576
    prompts = 512 * sum(len(request.hash_ids) for request in TINY)
    assert report.cache_bytes == prompts * row_bytes and report.workspace_bytes <= prompts * row_bytes
    assert report.verification.passed


def test_a_block_pool_costs_what_is_used_of_it() -> None:
    scheduler = Scheduler(TINY, budget=512, block_size=1, cache_tokens=2**50)
    assert [step.num_tokens for step in scheduler.steps()][:2] == [512, 512]
    assert scheduler.pool.available == 2**50
