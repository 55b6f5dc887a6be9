"""Turns a request trace into prefill steps: chunked prefill, prefix cache, paged blocks. Pure Python."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mla_prefill.cli.trace import TRACE_BLOCK, Request

# A full cache block is known by the trace block that it is a part of and its position there.
BlockKey = tuple[int, int]


class BlockPool:
    """The blocks of the paged cache. A block is in use (pinned), cached (reusable by its key), or free.

    Cached blocks that nobody uses are evicted when a block is needed and none is free, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._given_out = 0  # the first block that was never used: a large pool costs what is used of it
        self._free: deque[int] = deque()
        self._users: Counter[int] = Counter()
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and not in use, least recently used first

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could give out."""
        return self.num_blocks - self._given_out + len(self._free) + len(self._idle)

    def users(self, block: int) -> int:
        return self._users[block]

    def longest_hit(self, keys: Iterable[BlockKey]) -> list[int]:
        """The cached blocks of the leading keys, up to the first that is not cached."""
        hit = []
        for key in keys:
            if key not in self._block_of:
                break
            hit.append(self._block_of[key])
        return hit

    def pin(self, blocks: list[int]) -> None:
        for block in blocks:
            self._users[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """``count`` pinned blocks, the caller having checked ``available``."""
        blocks = []
        for _ in range(count):
            if self._given_out < self.num_blocks:
                block = self._given_out
                self._given_out += 1
            elif self._free:
                block = self._free.popleft()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._block_of[self._key_of.pop(block)]
                self.evictions += 1
            blocks.append(block)
        self.pin(blocks)
        return blocks

    def register(self, block: int, key: BlockKey) -> None:
        """The block now holds what the key stands for. Where another block does already, that one stays the cached."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: list[int]) -> None:
        """Unpins a request's blocks, given in order. The deepest becomes the first to be evicted."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)


@dataclass
class RunningRequest:
    index: int  # in the trace
    request: Request
    blocks: list[int]  # the whole prompt's cache blocks, in order
    hit_tokens: int  # found in the cache at admission
    computed: int = field(init=False)  # tokens whose latents are in the cache

    def __post_init__(self) -> None:
        self.computed = self.hit_tokens


@dataclass(frozen=True)
class ScheduledRequest:
    """What a step computes of a request: tokens [context, context + tokens) of its prompt."""

    index: int
    request: Request
    context: int
    tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class Step:
    requests: list[ScheduledRequest]

    @property
    def num_tokens(self) -> int:
        return sum(entry.tokens for entry in self.requests)


class Scheduler:
    """First come, first served; a step takes up to ``budget`` tokens, so a long prompt runs in several steps.

    A request is admitted when the cache has room for its whole prompt, so admitted requests always finish. At its
    admission the leading blocks that are in the cache become its context, except that the last token of a prompt is
    always computed. Decoding is not simulated: a request lets go of its blocks when its prompt is done.

    Args:
        requests: in order of arrival.
        budget: new tokens per step.
        block_size: tokens per cache block; divides the trace's blocks of 512 tokens.
        cache_tokens: room in the cache, rounded down to whole blocks.

    Raises:
        ValueError: sizes that don't fit each other, or a prompt that is longer than the cache.
    """

    def __init__(self, requests: list[Request], *, budget: int, block_size: int, cache_tokens: int) -> None:
        if budget < 1:
            raise ValueError(f"budget: expected at least 1 token per step, got {budget}")
        if block_size < 1 or TRACE_BLOCK % block_size:
            raise ValueError(f"block_size: expected a divisor of the trace's block of {TRACE_BLOCK}, got {block_size}")
        longest = max((request.input_length for request in requests), default=0)
        num_blocks = cache_tokens // block_size
        if -(-longest // block_size) > num_blocks:
            raise ValueError(
                f"cache_tokens: expected room for the longest prompt of {longest} tokens, "
                f"got {num_blocks} blocks of {block_size}"
            )
        self.budget = budget
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.hit_tokens = 0
        self.admitted = 0
        self._waiting = deque(enumerate(requests))
        self._running: deque[RunningRequest] = deque()

    def steps(self) -> Iterator[Step]:
        """The steps in order. Asking for the next one says that the one before has been computed."""
        while self._waiting or self._running:
            scheduled = self._schedule()
            yield Step([entry for _, entry in scheduled])
            for running, entry in scheduled:
                self._finish(running, entry)

    def _schedule(self) -> list[tuple[RunningRequest, ScheduledRequest]]:
        scheduled, room = [], self.budget
        for running in self._running:
            if room == 0:
                break
            scheduled.append(self._take(running, room))
            room -= scheduled[-1][1].tokens
        while room > 0 and self._waiting:
            running = self._admit(*self._waiting[0])
            if running is None:
                break
            self._waiting.popleft()
            self._running.append(running)
            scheduled.append(self._take(running, room))
            room -= scheduled[-1][1].tokens
        return scheduled

    def _take(self, running: RunningRequest, room: int) -> tuple[RunningRequest, ScheduledRequest]:
        tokens = min(running.request.input_length - running.computed, room)
        entry = ScheduledRequest(running.index, running.request, running.computed, tokens, running.blocks)
        return running, entry

    def _admit(self, index: int, request: Request) -> RunningRequest | None:
        last_token_block = (request.input_length - 1) // self.block_size
        hit = self.pool.longest_hit(self._key(request, position) for position in range(last_token_block))
        self.pool.pin(hit)
        missing = -(-request.input_length // self.block_size) - len(hit)
        if missing > self.pool.available:
            self.pool.release(hit)
            return None
        running = RunningRequest(index, request, hit + self.pool.allocate(missing), len(hit) * self.block_size)
        self.admitted += 1
        self.hit_tokens += running.hit_tokens
        return running

    def _finish(self, running: RunningRequest, entry: ScheduledRequest) -> None:
        end = entry.context + entry.tokens
        for position in range(entry.context // self.block_size, end // self.block_size):
            self.pool.register(running.blocks[position], self._key(running.request, position))
        running.computed = end
        if end == running.request.input_length:
            self._running.remove(running)
            self.pool.release(running.blocks)

    def _key(self, request: Request, position: int) -> BlockKey:
        trace_block, part = divmod(position, TRACE_BLOCK // self.block_size)
        return request.hash_ids[trace_block], part
