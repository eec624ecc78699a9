"""The version of the program, from its installed metadata.

Invariants: a source tree that is not installed says so instead of guessing a number.
Knows nothing else.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("stoker")
    except PackageNotFoundError:
        return "0+source"


VERSION = _installed()
