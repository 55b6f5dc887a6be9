from __future__ import annotations


class EmulatorError(Exception):
    """The code did what it must not, or something that is not modelled."""
