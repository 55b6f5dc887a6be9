"""Request traces in Mooncake's format (kvcache-ai/Mooncake, FAST'25): one JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from mla_prefill.cli.checks import INT32_MAX, short

TRACE_BLOCK = 512  # tokens that one entry of hash_ids stands for
_MAX_LINE = 64 << 20  # bytes: a device or a file of another kind may have no line ends


@dataclass(frozen=True)
class Request:
    """A request of the trace. Requests whose hash_ids begin alike share that prefix of their prompts."""

    timestamp: float  # ms
    input_length: int  # tokens of the prompt
    output_length: int
    hash_ids: tuple[int, ...]  # one per TRACE_BLOCK tokens, the last one for what remains


class TraceError(ValueError):
    """A line that is not a request; names file, line, field, what was expected and what came."""


def read_trace(path: Path, limit: int | None = None, max_length: int | None = None) -> list[Request]:
    """The first ``limit`` requests of a trace whose prompts have at most ``max_length`` tokens.

    They come by timestamp, and in file order where it is equal.

    Raises:
        TraceError: a malformed line, or no request at all.
        OSError: the file can't be read.
    """
    parsed = (_parse(where, line) for where, line in _lines(path))
    fitting = (request for request in parsed if max_length is None or request.input_length <= max_length)
    requests = list(islice(fitting, limit))
    if not requests:
        wanted = "" if max_length is None else f" of at most {max_length} tokens"
        raise TraceError(f"{path}: expected at least one request{wanted}, got none")
    return sorted(requests, key=lambda request: request.timestamp)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that are not empty, each with where it stands."""
    with path.open("rb") as file:
        for number in count(1):
            where, line = f"{path}:{number}", file.readline(_MAX_LINE + 1)
            if len(line) > _MAX_LINE:
                raise TraceError(f"{where}: expected at most {_MAX_LINE:,} bytes, got a longer line")
            if not line:
                return
            if line := line.strip():
                yield where, line


def _parse(where: str, line: bytes) -> Request:
    try:
        record = json.loads(line.decode("utf-8-sig"), parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        got = short(line.decode(errors="replace"))
        raise TraceError(f"{where}: expected a JSON object, got {got} ({error})") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, got {short(record)}")
    request = Request(
        timestamp=_timestamp(where, record),
        input_length=_integer(where, record, "input_length", 1, INT32_MAX),
        output_length=_integer(where, record, "output_length", 0),
        hash_ids=_hash_ids(where, record),
    )
    blocks = -(-request.input_length // TRACE_BLOCK)
    if len(request.hash_ids) != blocks:
        raise TraceError(
            f"{where}: hash_ids: expected {blocks} ids (one per {TRACE_BLOCK} of {request.input_length} tokens), "
            f"got {len(request.hash_ids)}"
        )
    return request


def _field(where: str, record: dict[str, Any], name: str, expected: str) -> Any:
    if name not in record:
        raise TraceError(f"{where}: {name}: expected {expected}, got no such field")
    return record[name]


def _timestamp(where: str, record: dict[str, Any]) -> float:
    expected = "a finite number >= 0"
    value = _field(where, record, "timestamp", expected)
    if not (_is_integer(value) or (isinstance(value, float) and math.isfinite(value))) or value < 0:
        raise TraceError(f"{where}: timestamp: expected {expected}, got {short(value)}")
    return value


def _integer(where: str, record: dict[str, Any], name: str, low: int, high: int | None = None) -> int:
    expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    value = _field(where, record, name, expected)
    if not _is_integer(value) or value < low or (high is not None and value > high):
        raise TraceError(f"{where}: {name}: expected {expected}, got {short(value)}")
    return value


def _hash_ids(where: str, record: dict[str, Any]) -> tuple[int, ...]:
    expected = "a list of integers"
    value = _field(where, record, "hash_ids", expected)
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        raise TraceError(f"{where}: hash_ids: expected {expected}, got {short(value)}")
    return tuple(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_int(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # more digits than Python converts; the field's check says so
        return digits
