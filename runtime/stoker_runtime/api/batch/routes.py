"""The routes of files and batches.

Invariants: without a folder every one of them answers 501 and says which flag is missing.
Knows nothing of how files are kept or how batches run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stoker_runtime.api.answering.intake import Ask, ReadBody, State
from stoker_runtime.api.batch.execute import ENDPOINTS
from stoker_runtime.api.batch.file_store import read_pieces
from stoker_runtime.api.batch.folder import owner_of
from stoker_runtime.api.batch.records import BatchBody, new_batch
from stoker_runtime.api.batch.runner import BatchRunner
from stoker_runtime.api.batch.upload import read_upload
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.caller import Caller, Owner, check_key, let_in
from stoker_runtime.api.http.edge import direct
from stoker_runtime.api.http.fields import Body
from stoker_runtime.api.http.paging import DEFAULT_LIMIT, PageFields, PageQuery, page
from stoker_runtime.api.http.routing import Reads, Route
from stoker_runtime.api.http.sse import part
from stoker_runtime.errors import NotFoundError, RequestError, UnsupportedError

router = APIRouter(route_class=Route)
MOST_FILES = 10_000
PURPOSES = ("batch",)


class FileBody(Body):
    """POST /v1/files, as a form."""

    file: bytes
    purpose: str

    MEDIA_TYPE: ClassVar = "multipart/form-data"


class FilesQuery(PageFields):
    """Which files, and which page of them."""

    limit: int = Field(DEFAULT_LIMIT, ge=1, le=MOST_FILES)
    purpose: str | None = None


async def _batches(request: Request) -> BatchRunner:
    # Said before a body is read, but to nobody who may not ask.
    check_key(request)
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        raise UnsupportedError("Files and batches need a server that runs with --batch-dir FOLDER.")
    return runner


Runner = Annotated[BatchRunner, Depends(_batches)]


class Form(NamedTuple):
    """A form that is still to be read, and who sends it."""

    caller: Caller
    request: Request


class _ReadForm(Reads):
    """Hands the request to a handler that reads its form."""

    async def __call__(self, request: Request) -> Form:
        """The request, of which nothing was read."""
        return Form(let_in(request), request)


@router.post("/v1/files")
async def upload_file(state: State, runner: Runner, sent: Annotated[Form, Depends(_ReadForm(FileBody))]) -> Response:
    """POST /v1/files: keep a file of batch requests. Raises RequestError, TooLargeError or StorageError."""
    files = runner.files
    temporary = files.temporary()
    try:
        form = await read_upload(sent.request, temporary, state.config.max_file_bytes)
        for name in form.fields:
            if name not in FileBody.model_fields:
                raise RequestError(f"{name[:60]} is not supported by this server; leave it out.", param=name[:60])
        purpose = form.fields.get("purpose")
        if purpose not in PURPOSES:
            raise RequestError(f"purpose must be {' or '.join(PURPOSES)}.", param="purpose")
        owner = sent.caller.owner
        made = await asyncio.to_thread(files.add, temporary, form.filename, purpose, owner=owner)
        return JsonAnswer(shown(made))
    finally:
        temporary.unlink(missing_ok=True)


@router.get("/v1/files")
async def list_files(runner: Runner, owner: Owner, query: Annotated[FilesQuery, Query()]) -> Response:
    """GET /v1/files."""
    found = await asyncio.to_thread(runner.files.records, query.purpose, owner)
    return JsonAnswer(page(query, [shown(record) for record in found]))


@router.get("/v1/files/{name}")
async def get_file(runner: Runner, owner: Owner, name: str) -> Response:
    """GET /v1/files/ID. Raises NotFoundError."""
    return JsonAnswer(shown(await asyncio.to_thread(runner.files.get, name, owner)))


@router.delete("/v1/files/{name}")
async def delete_file(runner: Runner, owner: Owner, name: str) -> Response:
    """DELETE /v1/files/ID. Raises NotFoundError, StorageError, or RequestError for the input of a running batch."""
    await asyncio.to_thread(_delete, runner, name, owner)
    return JsonAnswer({"id": name, "object": "file", "deleted": True})


def _delete(runner: BatchRunner, name: str, owner: str) -> None:
    runner.files.get(name, owner)
    for record in runner.batches.unfinished():
        if record["input_file_id"] == name:
            raise RequestError(f"{name} is the input of {record['id']}, which is not finished.", param="file_id")
    runner.files.delete(name)


class FileContent(Response):
    """An answer that is a file, sent piece by piece."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(headers={"content-length": str(size)}, media_type="application/octet-stream")
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write it."""
        content = read_pieces(self._path)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = direct(scope, send)
        while piece := await asyncio.to_thread(next, content, b""):
            await send(part(piece))
        await send(part(b"", more=False))


@router.get("/v1/files/{name}/content")
async def get_file_content(runner: Runner, owner: Owner, name: str) -> Response:
    """GET /v1/files/ID/content. Raises NotFoundError."""
    path = await asyncio.to_thread(runner.files.path, name, owner)
    return FileContent(path, path.stat().st_size)


def shown(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without what only this server wants to know."""
    return {key: value for key, value in record.items() if key not in ("ending", "owner")}


@router.post("/v1/batches")
async def create_batch(runner: Runner, ask: Annotated[Ask[BatchBody], Depends(ReadBody(BatchBody))]) -> Response:
    """POST /v1/batches. Raises RequestError, NotFoundError or StorageError."""
    owner, body = ask.caller.owner, ask.body
    if body.endpoint not in ENDPOINTS:
        raise RequestError(
            f"endpoint is {body.endpoint[:60]!r}; it must be one of {', '.join(ENDPOINTS)}.", param="endpoint"
        )
    try:
        file = await asyncio.to_thread(runner.files.get, body.input_file_id, owner)
        if file["purpose"] != "batch":
            raise RequestError(f"{body.input_file_id} was not uploaded for batches.", param="input_file_id")
    except NotFoundError as error:
        raise RequestError(error.message, param="input_file_id") from error
    record = new_batch(body, owner)
    await asyncio.to_thread(runner.batches.add, record)
    runner.wake()
    return JsonAnswer(shown(record))


@router.get("/v1/batches")
async def list_batches(runner: Runner, owner: Owner, query: PageQuery) -> Response:
    """GET /v1/batches."""
    found = await asyncio.to_thread(runner.batches.records)
    return JsonAnswer(page(query, [shown(record) for record in found if owner_of(record) == owner]))


@router.get("/v1/batches/{name}")
async def get_batch(runner: Runner, owner: Owner, name: str) -> Response:
    """GET /v1/batches/ID. Raises NotFoundError."""
    return JsonAnswer(shown(await asyncio.to_thread(runner.batches.get, name, owner)))


@router.post("/v1/batches/{name}/cancel")
async def cancel_batch(runner: Runner, owner: Owner, name: str) -> Response:
    """POST /v1/batches/ID/cancel: finished lines keep their results, no other one runs. Raises NotFoundError."""
    return JsonAnswer(shown(await asyncio.to_thread(runner.batches.cancel, name, owner)))
