"""Routes of OpenAI's that take or make sound and pictures, which no model that is served here does.

Invariants: whoever may ask is told so in OpenAI's error form, before anything of a body is read; a client that lists
what a server can do finds a 501 here and not the 404 of a mistyped path.
Knows nothing of models.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from stoker_runtime.api.http.routing import Route
from stoker_runtime.errors import UnsupportedError

router = APIRouter(route_class=Route)


@router.post("/v1/audio/speech")
@router.post("/v1/audio/transcriptions")
@router.post("/v1/audio/translations")
async def audio() -> Response:
    """501: models that hear or speak are not served."""
    raise UnsupportedError(
        "This server serves models of text: it neither hears nor speaks. Serve an audio model beside it.",
        code="audio_not_supported",
    )


@router.post("/v1/images/generations")
@router.post("/v1/images/edits")
@router.post("/v1/images/variations")
async def images() -> Response:
    """501: models that make pictures are not served."""
    raise UnsupportedError(
        "This server serves models of text: it makes no pictures. Serve an image model beside it.",
        code="images_not_supported",
    )
