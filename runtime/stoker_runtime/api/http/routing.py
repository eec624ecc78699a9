"""How a route of this server is told to FastAPI, and what it says of itself in the document.

Invariants: a route asks for a key unless it is an `OpenRoute`. One that reads a body reads it by a `Reads` dependency,
from whose class the document is made: what it says of a body is what the validator checks. A route's first line of
documentation is its summary.
Knows nothing of handlers beyond their annotations and docstrings.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from fastapi import Depends, params
from fastapi.routing import APIRoute

from stoker_runtime.api.http.caller import admitted
from stoker_runtime.api.http.fields import Body

REFERENCE = "#/components/schemas/"
ERROR_ANSWER = {"description": "an error", "content": {"application/json": {"schema": {"$ref": f"{REFERENCE}Error"}}}}


class Reads:
    """Base of dependencies that let a caller in, and read a body of the class `model`."""

    def __init__(self, model: type[Body]) -> None:
        self.model = model


def body_of(endpoint: Callable[..., Any]) -> type[Body] | None:
    """The class of the body that `endpoint` reads."""
    for hint in typing.get_type_hints(endpoint, include_extras=True).values():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, params.Depends) and isinstance(extra.dependency, Reads):
                return extra.dependency.model
    return None


class OpenRoute(APIRoute):
    """A route that asks for no key."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        """As APIRoute; answers are not validated, for each handler writes its own bytes."""
        said = (endpoint.__doc__ or "").strip().partition("\n")[0]
        settings |= {"response_model": None, "response_description": "the answer"}
        settings |= {"responses": {"default": ERROR_ANSWER}, "summary": said.partition(" Raises ")[0]}
        if (body := body_of(endpoint)) is not None:
            schema = {"$ref": REFERENCE + body.__name__}
            settings["openapi_extra"] = {
                "requestBody": {"required": True, "content": {body.MEDIA_TYPE: {"schema": schema}}}
            }
        super().__init__(path, endpoint, **settings)


class Route(OpenRoute):
    """A route that asks for a key."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        """As APIRoute."""
        # What reads a body lets its caller in itself: a dependency less.
        if body_of(endpoint) is None:
            settings["dependencies"] = [*(settings.get("dependencies") or ()), Depends(admitted)]
        super().__init__(path, endpoint, **settings)
