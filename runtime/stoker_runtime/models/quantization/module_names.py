"""Whether a pattern of a `quantization_config` names a module.

Knows nothing of what being named means.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase


def is_named(pattern: str, module: str) -> bool:
    """A module, or one that it is part of, by its full name or by the end of it; `re:` before a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return f".{pattern}." in f".{module}."


def is_matched(pattern: str, module: str) -> bool:
    """As `is_named`; or `*` in a pattern stands for any letters of the full name."""
    return is_named(pattern, module) or ("*" in pattern and fnmatchcase(module, pattern))
