"""A form with a file, read as it comes: small fields to memory, the file straight to the disk.

Invariants: memory does not grow with the file; a form that is broken or too large leaves nothing behind.
Knows nothing of what becomes of the file.
"""

from __future__ import annotations

import asyncio
from io import BufferedWriter
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from stoker_runtime.api.batch.folder import storage_errors
from stoker_runtime.api.http.http import ClientGone, Request
from stoker_runtime.errors import RequestError, TooLargeError

MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
FILE_FIELD = "file"


class UploadForm:
    """What was read of a form so far: `fields`, and the name of the file that went to `target`."""

    def __init__(self, boundary: bytes, target: BufferedWriter) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.complete = False
        self._target = target
        self._parts = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._name = ""
        self._value = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._header_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def feed(self, data: bytes) -> None:
        """Read on. Raises RequestError or StorageError."""
        try:
            with storage_errors():
                self._parser.write(data)
        except FormParserError as error:
            raise RequestError("The body is not a valid multipart form.") from error

    def _begin(self) -> None:
        self._parts += 1
        self._name = ""
        self._value.clear()
        if self._parts > MAX_PARTS:
            raise RequestError(f"The form has more than {MAX_PARTS} parts.")

    def _header_end(self) -> None:
        name, value = (bytes(part).decode("utf-8", "replace") for part in self._header)
        self._header = (bytearray(), bytearray())
        if name.lower() != "content-disposition":
            return
        _, options = parse_options_header(value)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == FILE_FIELD:
            if self.filename is not None:
                raise RequestError("The form has more than one file.", param=FILE_FIELD)
            self.filename = options.get(b"filename", b"upload").decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE_FIELD:
            self._target.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise TooLargeError(f"The field {self._name[:60]} is longer than {MAX_FIELD_BYTES} bytes.")

    def _end(self) -> None:
        if self._name != FILE_FIELD:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.complete = True


async def read_upload(request: Request, target: Path, limit: int) -> UploadForm:
    """Read a form whose file goes to `target`. Raises RequestError, TooLargeError, StorageError or ClientGone."""
    header = request.headers.get(b"content-type", b"").decode("latin-1")
    kind, options = parse_options_header(header)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise RequestError("A file comes as a form: content-type multipart/form-data with a boundary.")
    with storage_errors(), target.open("wb") as file:
        form = UploadForm(options[b"boundary"], file)
        size = 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message.get("body", b""))
            if size > limit:
                raise TooLargeError(f"The form has more than {limit} bytes, which is the most allowed.")
            await asyncio.to_thread(form.feed, message.get("body", b""))
            if not message.get("more_body", False):
                break
    if not form.complete:
        raise RequestError("The form ends before its last boundary.")
    if form.filename is None:
        raise RequestError("file is required.", param=FILE_FIELD)
    return form
