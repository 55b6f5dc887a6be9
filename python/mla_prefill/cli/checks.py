"""What the commands say of a value that they can't take."""

from __future__ import annotations

import reprlib

INT32_MAX = 2**31 - 1

_repr = reprlib.Repr()  # bounded, whatever the value nests or holds
_repr.maxlist = _repr.maxstring = _repr.maxlong = 60


def expect_between(name: str, value: int, low: int, high: int = INT32_MAX) -> None:
    """Raises ValueError where the value is out of range."""
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low:,} to {high:,}, got {short(value)}")


def short(value: object) -> str:
    """The value's repr in at most 60 characters."""
    text = _repr.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
