"""A batch as clients see it and as it is stored.

Invariants: each status is entered once, in OpenAI's order, with the second in which it was.
Knows nothing of lines, files or where records are kept.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stoker_runtime.api.batch.folder import new_id
from stoker_runtime.api.http.fields import Body
from stoker_runtime.errors import RequestError

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
STATUSES = (*UNFINISHED, "completed", "failed", "expired", "cancelled")
BATCH_PREFIX = "batch_"
HOURS = {"h": 1, "d": 24}
MAX_HOURS = 24 * 30


class BatchBody(Body):
    """POST /v1/batches. `completion_window` is a number of hours or days, such as 24h."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = Field(None, max_length=16)
    output_expires_after: Any = None

    UNSUPPORTED: ClassVar = {"output_expires_after": (None,)}


def window_seconds(window: str) -> int:
    """The length of a completion window. Raises RequestError."""
    found = re.fullmatch(r"(\d{1,4})([hd])", window, re.ASCII)
    hours = int(found[1]) * HOURS[found[2]] if found else 0
    if not 1 <= hours <= MAX_HOURS:
        raise RequestError(
            f"completion_window must be hours or days, such as 24h, and at most {MAX_HOURS}h.",
            param="completion_window",
        )
    return hours * 3600


def new_batch(body: BatchBody, owner: str) -> dict[str, Any]:
    """The record of a batch that `owner` just asked for. Raises RequestError."""
    seconds, now = window_seconds(body.completion_window), int(time.time())
    return {
        "id": new_id(BATCH_PREFIX),
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + seconds,
        **{f"{status}_at": None for status in STATUSES if status != "validating"},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        "owner": owner,
    }


def entered(record: Mapping[str, Any], status: str, **fields: Any) -> dict[str, Any]:
    """`record` in its next status."""
    return {**record, "status": status, f"{status}_at": int(time.time()), **fields}
