"""Whether a pattern of a `quantization_config` names a module.

Knows nothing of what being named means.
"""

from __future__ import annotations

import re


def is_named(pattern: str, module: str) -> bool:
    """A module, or one that it is part of, by its full name or by the end of it; `re:` before a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return f".{pattern}." in f".{module}."
