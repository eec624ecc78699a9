"""A form with a file, read as it comes: small fields to memory, the file straight to the disk.

Invariants: memory does not grow with the file; a form that is broken or too large leaves nothing behind.
Knows nothing of what becomes of the file.
"""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from stoker_runtime.api.batch.folder import storage_errors
from stoker_runtime.api.http.reading import pieces
from stoker_runtime.errors import RequestError

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16
FILE_FIELD = "file"


class _StraightToDisk(MultiPartParser):
    """A form's parser whose one file goes to `target`, in the folder where it stays, and not to the system's own."""

    target: BufferedWriter
    complete = False

    def on_headers_finished(self) -> None:
        """A part begins."""
        super().on_headers_finished()
        begun = self._current_part
        if begun.file is not None:
            begun.file.file.close()
            begun.file = UploadFile(self.target, size=0, filename=begun.file.filename, headers=begun.file.headers)

    def on_end(self) -> None:
        """The last boundary."""
        super().on_end()
        self.complete = True


class UploadForm:
    """A form that was read: `fields`, and the name of its file."""

    def __init__(self, fields: dict[str, str], filename: str) -> None:
        self.fields = fields
        self.filename = filename


async def read_upload(request: Request, target: Path, limit: int) -> UploadForm:
    """Read a form whose file goes to `target`. Raises RequestError, TooLargeError, StorageError or ClientDisconnect."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise RequestError("A file comes as a form: content-type multipart/form-data with a boundary.")
    with storage_errors(), target.open("wb") as file:
        parser = _StraightToDisk(
            request.headers,
            pieces(request, limit),
            max_files=1,
            max_fields=MAX_FIELDS,
            max_part_size=MAX_FIELD_BYTES,
        )
        parser.target = file
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise RequestError(f"The body is not a valid multipart form: {error.message}") from error
        if not parser.complete:
            raise RequestError("The form ends before its last boundary.")
        uploaded = form.get(FILE_FIELD)
        if not isinstance(uploaded, UploadFile):
            raise RequestError("file is required.", param=FILE_FIELD)
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        return UploadForm(fields, uploaded.filename or "upload")
