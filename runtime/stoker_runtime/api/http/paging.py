"""Lists in pages, as OpenAI's list routes give them.

Invariants: `after` names the last entry of the page before, in whichever order; an unknown one is an error.
Knows nothing of what is listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from stoker_runtime.errors import RequestError

DEFAULT_LIMIT, MOST = 20, 100


class PageFields(BaseModel):
    """The fields of a query that asks for a page."""

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MOST)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


PageQuery = Annotated[PageFields, Query()]


def page(query: PageFields, oldest_first: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The page of `oldest_first` that `query` asks for. Raises RequestError."""
    entries = list(oldest_first) if query.order == "asc" else list(reversed(oldest_first))
    if query.after is not None:
        start = next((at + 1 for at, entry in enumerate(entries) if entry["id"] == query.after), None)
        if start is None:
            raise RequestError(f"after is {query.after[:80]!r}, which is not in the list.", param="after")
        entries = entries[start:]
    shown = entries[: query.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(entries) > len(shown),
    }
