"""Request traces in Mooncake's format (kvcache-ai/Mooncake, FAST'25): one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

TRACE_BLOCK = 512  # tokens that one entry of hash_ids stands for


@dataclass(frozen=True)
class Request:
    """A request of the trace. Requests whose hash_ids begin alike share that prefix of their prompts."""

    timestamp: int  # ms
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
    with path.open(encoding="utf-8", errors="replace") as lines:
        parsed = (_parse(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
        short = (request for request in parsed if max_length is None or request.input_length <= max_length)
        requests = list(islice(short, limit))
    if not requests:
        wanted = "" if max_length is None else f" of at most {max_length} tokens"
        raise TraceError(f"{path}: expected at least one request{wanted}, got none")
    return sorted(requests, key=lambda request: request.timestamp)


def _parse(where: str, line: str) -> Request:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: expected a JSON object, got {_short(line.strip())} ({error})") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, got {_short(record)}")
    request = Request(
        timestamp=_integer(where, record, "timestamp", at_least=0),
        input_length=_integer(where, record, "input_length", at_least=1),
        output_length=_integer(where, record, "output_length", at_least=0),
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


def _integer(where: str, record: dict[str, Any], name: str, at_least: int) -> int:
    expected = f"an integer >= {at_least}"
    value = _field(where, record, name, expected)
    if not _is_integer(value) or value < at_least:
        raise TraceError(f"{where}: {name}: expected {expected}, got {_short(value)}")
    return value


def _hash_ids(where: str, record: dict[str, Any]) -> tuple[int, ...]:
    expected = "a list of integers"
    value = _field(where, record, "hash_ids", expected)
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        raise TraceError(f"{where}: hash_ids: expected {expected}, got {_short(value)}")
    return tuple(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
