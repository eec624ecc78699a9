"""Answers that are whole, in the bytes that every route of this server writes.

Invariants: JSON has no blanks and no NaN; what is not ASCII stands as UTF-8. Nothing is validated on its way out.
Knows nothing of routes or errors.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


class JsonAnswer(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """`content` as it is sent."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
