"""The pages for people: a chat at `/`, the list of routes at `/docs`. Single files that load nothing from elsewhere.

Invariants: a browser runs the page's own script and no other, whatever a model writes: the policy that goes with a
page names the script by its digest.
Knows nothing of what the pages do.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from stoker_runtime.api.http.routing import OpenRoute

router = APIRouter(route_class=OpenRoute)
SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


@cache
def _page(name: str) -> tuple[bytes, dict[str, str]]:
    """A page, and the headers that go with it."""
    body = files("stoker_runtime.api").joinpath("static", name).read_bytes()
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in SCRIPT.findall(body)]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src {scripts}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body, {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _answer(name: str) -> Response:
    body, headers = _page(name)
    return Response(body, headers=headers, media_type="text/html")


@router.get("/")
async def chat_page() -> Response:
    """GET /: a page to talk to the model."""
    return _answer("chat.html")


@router.get("/docs")
async def docs_page() -> Response:
    """GET /docs: the routes and their fields, for people."""
    return _answer("docs.html")
