"""Where a request says that an image is, and the bytes of one that lies in the request itself (`data:`).

Invariants: bytes are bounded before they are decoded; no message holds a URL, which may be an image or carry a secret.
Knows nothing of what the bytes are, nor of hosts.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass
from urllib.parse import unquote

from stoker_runtime.errors import RequestError

MAX_BYTES = 32 * 1024 * 1024
"""Of one file."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where a request says that an image is, and the field in which it says so."""

    url: str
    field: str

    @property
    def is_data(self) -> bool:
        """Whether it lies in the request."""
        return self.url[:5].lower() == "data:"

    def refused(self, why: str, *, said: bool = True) -> RequestError:
        """The error of an image that cannot be had. `why` goes on from the field's name, or where not `said` behind a
        colon.
        """
        return RequestError(f"{self.field}{' ' if said else ': '}{why}.", param=self.field)

    def too_large(self) -> RequestError:
        """The error of a file beyond `MAX_BYTES`."""
        return self.refused(f"is larger than {MAX_BYTES >> 20} MiB, which is the most of one image")


def read_data_url(source: ImageSource) -> bytes:
    """The bytes of a `data:` URL. Raises RequestError."""
    head, comma, payload = source.url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise source.refused('must be of the form "data:image/png;base64,…"')
    if len(payload) > MAX_BYTES * 4 // 3 + 4:
        raise source.too_large()
    try:
        data = b64decode("".join((unquote(payload) if "%" in payload else payload).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise source.refused("is not valid base64") from error
    if len(data) > MAX_BYTES:
        raise source.too_large()
    return data
