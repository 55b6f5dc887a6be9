"""Where text leaves the command line: whatever it holds is printed literally, in any encoding, and nothing is cut."""

from __future__ import annotations

import codecs
import io
import sys
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_NO_LIMIT = 1_000_000  # columns
_PLAIN = {"µ": "u", "…": "..."}


class LiteralConsole(Console):
    """Prints a string as the one line that it is: no markup, no emoji codes, control characters escaped.

    A part with a style is ``render_str(text, style=style)``; rich's ``Text`` would let control characters through.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def print_numbers(self, table: Table) -> None:
        """As wide as its cells need also where the console is narrower: no number is cut or wrapped."""
        for column in table.columns:
            column.no_wrap = True
        table.width = Measurement.get(self, self.options.update(width=_NO_LIMIT), table).maximum
        self.print(table, crop=False)


def printable(text: str) -> str:
    """The text with what a terminal would not show as a character (escapes, newlines, lone surrogates) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def write_any_encoding() -> None:
    """stdout and stderr write a stand-in for what their encoding lacks."""
    codecs.register_error("mla_prefill.stand_in", _stand_in)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="mla_prefill.stand_in")


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("unicode_escape").decode() for c in lacking), error.end
