"""Arguments that both benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def name_list(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: names separated by commas, each a known one."""
    known = list(known)

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"expected names out of {known}, got {unknown or text!r}")
        return names

    return parse


def head_dims(text: str) -> tuple[int, int, int]:
    """An argparse type: ``nope,rope,v``."""
    try:
        nope, rope, dim_v = (int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected three numbers as 128,64,128, got {text!r}") from error
    return nope, rope, dim_v


def add_common(parser: argparse.ArgumentParser, cases: Iterable[str]) -> None:
    cases = list(cases)
    parser.add_argument("--case", type=name_list(cases), default=cases, metavar="A,B", help=f"of {', '.join(cases)}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there")
