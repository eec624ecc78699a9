"""The routes of files and batches.

Invariants: without a folder every one of them answers 501 and says which flag is missing.
Knows nothing of how files are kept or how batches run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from stoker_runtime.api.answering.intake import read_request
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.batch.execute import ENDPOINTS
from stoker_runtime.api.batch.file_store import read_pieces
from stoker_runtime.api.batch.records import BatchBody, new_batch
from stoker_runtime.api.batch.runner import BatchRunner
from stoker_runtime.api.batch.upload import read_upload
from stoker_runtime.api.http.fields import Body
from stoker_runtime.api.http.http import Header, Request, Response, Send, json_response
from stoker_runtime.api.http.paging import page, page_query
from stoker_runtime.errors import NotFoundError, RequestError, UnsupportedError

MOST_FILES = 10_000
FILES_QUERY = {**page_query(MOST_FILES), "purpose": {"type": "string"}}
PURPOSES = ("batch",)


class FileBody(Body):
    """POST /v1/files, as a form."""

    file: bytes
    purpose: str

    MEDIA_TYPE: ClassVar = "multipart/form-data"


def _batches(state: ServerState) -> BatchRunner:
    if state.batches is None:
        raise UnsupportedError("Files and batches need a server that runs with --batch-dir FOLDER.")
    return state.batches


async def upload_file(state: ServerState, request: Request) -> Response:
    """POST /v1/files: keep a file of batch requests. Raises RequestError, TooLargeError or StorageError."""
    files = _batches(state).files
    temporary = files.temporary()
    try:
        form = await read_upload(request, temporary, state.config.max_file_bytes)
        for name in form.fields:
            if name not in FileBody.model_fields:
                raise RequestError(f"{name[:60]} is not supported by this server; leave it out.", param=name[:60])
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            raise RequestError(f"purpose must be {' or '.join(PURPOSES)}.", param="purpose")
        return json_response(await asyncio.to_thread(files.add, temporary, form.filename or "upload", purpose))
    finally:
        temporary.unlink(missing_ok=True)


async def list_files(state: ServerState, request: Request) -> Response:
    """GET /v1/files."""
    found = await asyncio.to_thread(_batches(state).files.records, request.query.get("purpose"))
    return json_response(page(request, found, MOST_FILES))


async def get_file(state: ServerState, request: Request) -> Response:
    """GET /v1/files/ID. Raises NotFoundError."""
    return json_response(await asyncio.to_thread(_batches(state).files.get, request.name))


async def delete_file(state: ServerState, request: Request) -> Response:
    """DELETE /v1/files/ID. Raises NotFoundError, StorageError, or RequestError for the input of a running batch."""
    await asyncio.to_thread(_delete, _batches(state), request.name)
    return json_response({"id": request.name, "object": "file", "deleted": True})


def _delete(runner: BatchRunner, name: str) -> None:
    runner.files.get(name)
    for record in runner.batches.unfinished():
        if record["input_file_id"] == name:
            raise RequestError(f"{name} is the input of {record['id']}, which is not finished.", param="file_id")
    runner.files.delete(name)


class FileContent:
    """An answer that is a file, sent piece by piece."""

    def __init__(self, path: Path, size: int) -> None:
        self.status = 200
        self.headers: list[Header] = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % size),
        ]
        self._path = path

    async def send(self, request: Request, send: Send) -> None:
        """Write it."""
        pieces = read_pieces(self._path)
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        while piece := await asyncio.to_thread(next, pieces, b""):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def get_file_content(state: ServerState, request: Request) -> FileContent:
    """GET /v1/files/ID/content. Raises NotFoundError."""
    path = await asyncio.to_thread(_batches(state).files.path, request.name)
    return FileContent(path, path.stat().st_size)


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without what only the runner wants to know."""
    return {key: value for key, value in record.items() if key != "ending"}


async def create_batch(state: ServerState, request: Request) -> Response:
    """POST /v1/batches. Raises RequestError, NotFoundError or StorageError."""
    runner = _batches(state)
    body = await read_request(state, request, BatchBody)
    if body.endpoint not in ENDPOINTS:
        raise RequestError(
            f"endpoint is {body.endpoint[:60]!r}; it must be one of {', '.join(ENDPOINTS)}.", param="endpoint"
        )
    try:
        file = await asyncio.to_thread(runner.files.get, body.input_file_id)
        if file["purpose"] != "batch":
            raise RequestError(f"{body.input_file_id} was not uploaded for batches.", param="input_file_id")
    except NotFoundError as error:
        raise RequestError(error.message, param="input_file_id") from error
    record = new_batch(body)
    await asyncio.to_thread(runner.batches.add, record)
    runner.wake()
    return json_response(shown(record))


async def list_batches(state: ServerState, request: Request) -> Response:
    """GET /v1/batches."""
    found = await asyncio.to_thread(_batches(state).batches.records)
    return json_response(page(request, [shown(record) for record in found]))


async def get_batch(state: ServerState, request: Request) -> Response:
    """GET /v1/batches/ID. Raises NotFoundError."""
    return json_response(shown(await asyncio.to_thread(_batches(state).batches.get, request.name)))


async def cancel_batch(state: ServerState, request: Request) -> Response:
    """POST /v1/batches/ID/cancel: finished lines keep their results, no other one runs. Raises NotFoundError."""
    return json_response(shown(await asyncio.to_thread(_batches(state).batches.cancel, request.name)))
