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

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.http import Header, Request, Response

SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


@cache
def _page(name: str) -> tuple[bytes, list[Header]]:
    """A page, and the headers that go with it."""
    body = files("stoker_runtime.api").joinpath("static", name).read_bytes()
    digests = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in SCRIPT.findall(body)]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src {scripts}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body, [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]


def _answer(name: str) -> Response:
    body, headers = _page(name)
    response = Response(body, b"text/html; charset=utf-8")
    response.headers += headers
    return response


async def chat_page(_: ServerState, request: Request) -> Response:
    """GET /: a page to talk to the model."""
    return _answer("chat.html")


async def docs_page(_: ServerState, request: Request) -> Response:
    """GET /docs: the routes and their fields, for people."""
    return _answer("docs.html")
