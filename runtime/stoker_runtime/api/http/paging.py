"""Lists in pages, as OpenAI's list routes give them.

Invariants: `after` names the last entry of the page before, in whichever order; an unknown one is an error.
Knows nothing of what is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker_runtime.api.http.http import Request
from stoker_runtime.errors import RequestError

DEFAULT_LIMIT, MOST = 20, 100
ORDERS = ("asc", "desc")


def page_query(most: int = MOST) -> dict[str, dict[str, Any]]:
    """The fields of a query that `page` reads, as JSON schemas."""
    return {
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": DEFAULT_LIMIT},
        "order": {"type": "string", "enum": list(ORDERS), "default": "desc"},
        "after": {"type": "string"},
    }


def page(request: Request, oldest_first: Sequence[dict[str, Any]], most: int = MOST) -> dict[str, Any]:
    """The page of `oldest_first` that the query asks for by limit, order and after. Raises RequestError."""
    order = request.query.get("order", "desc")
    if order not in ORDERS:
        raise RequestError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}.", param="order")
    asked = request.query.get("limit", str(DEFAULT_LIMIT))
    if not (asked.isascii() and asked.isdigit() and len(asked) < 6 and 1 <= int(asked) <= most):
        raise RequestError(f"limit is {asked[:20]!r}; it must be a number from 1 to {most}.", param="limit")
    entries = list(oldest_first) if order == "asc" else list(reversed(oldest_first))
    after = request.query.get("after")
    if after is not None:
        start = next((at + 1 for at, entry in enumerate(entries) if entry["id"] == after), None)
        if start is None:
            raise RequestError(f"after is {after[:80]!r}, which is not in the list.", param="after")
        entries = entries[start:]
    shown = entries[: int(asked)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(entries) > len(shown),
    }
