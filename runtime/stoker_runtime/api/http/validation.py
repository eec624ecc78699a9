"""Turn the bytes of a request into a body object, or into an error that names the field at fault.

Invariants: whatever the bytes, the outcome is a body or a RequestError; nothing is ignored. Messages quote at most
a short piece of the caller's own input.
Knows nothing of engines, tokens or routes.
"""

from __future__ import annotations

import difflib
import json
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stoker_runtime.api.http.aside import LARGE_BYTES
from stoker_runtime.api.http.fields import Body, SizedBody
from stoker_runtime.api.http.large_json import read_large
from stoker_runtime.errors import RequestError

B = TypeVar("B", bound=Body)
QUOTE_LIMIT = 60
PHRASES = (
    ("Input should be ", "must be "),
    ("Input should have ", "must have "),
    ("List should have ", "must have "),
    ("String should have ", "must have "),
    ("Field required", "is required"),
    (" after validation", ""),
)
HINTS = {"extra_body": ", which is an argument of clients; its fields belong beside the others."}
ADVICE = {"functions": "use tools", "function_call": "use tool_choice"}
SAYS_IT_ALL = {"missing", "too_short", "too_long"}
"""Kinds of errors whose message needs no quote of the input."""
IN_JSON = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}
"""What is said of a text is said of values that were read from it."""


def parse_body(raw: bytes, model: type[B], numbers: int = 0) -> B:
    """The body that `raw` holds, every unsupported field refused; `numbers` as in `read_large`. Raises RequestError."""
    try:
        if len(raw) > LARGE_BYTES:
            body = model.model_validate(read_large(raw, numbers))
        else:
            body = model.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], model) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    refuse_unsupported(body)
    if isinstance(body, SizedBody):
        body.size = len(raw)
    return body


def sent(raw: bytes) -> Any:
    """What a body that was read before looks like as it came."""
    return read_large(raw, len(raw)) if len(raw) > LARGE_BYTES else json.loads(raw)


def query_error(details: Sequence[ErrorDetails]) -> RequestError:
    """What is wrong with a query, or another part of a request that FastAPI reads, by the first of its `details`."""
    detail = details[0].copy()
    # FastAPI begins with the part.
    detail["loc"] = tuple(detail["loc"])[1:]
    return _explain(detail, BaseModel)


def refuse_unsupported(body: Body, path: str = "") -> None:
    """Raise RequestError for the first field, nested ones included, that asks for what is not supported."""
    for name in sorted(body.model_fields_set):
        value = getattr(body, name)
        where = f"{path}{name}"
        off = body.UNSUPPORTED.get(name)
        if off is not None and not any(value == entry and type(value) is type(entry) for entry in off):
            values = ", ".join(_as_json(entry) for entry in off if entry is not None)
            advice = f"leave it out or set it to {values}" if values else ADVICE.get(name, "leave it out")
            raise RequestError(f"{where} is not supported by this server; {advice}.", param=where)
        if isinstance(value, Body):
            refuse_unsupported(value, f"{where}.")
        elif isinstance(value, list):
            for at, entry in enumerate(value):
                if isinstance(entry, Body):
                    refuse_unsupported(entry, f"{where}[{at}].")


def _as_json(value: object) -> str:
    names = {True: "true", False: "false"}
    return names[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def _explain(detail: ErrorDetails, model: type[BaseModel]) -> RequestError:
    kind = detail["type"]
    message = IN_JSON.get(kind, detail["msg"])
    if kind == "json_invalid":
        return RequestError(f"The body is not valid JSON: {detail.get('ctx', {}).get('error', message)}.")
    location = detail["loc"]
    if not location:
        return RequestError("The body must be a JSON object.")
    path = _path(location)
    if kind == "extra_forbidden":
        known = _model_at(model, location[:-1]).model_fields
        near = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else HINTS.get(str(location[-1]), ".")
        return RequestError(f"Unknown field {path}{hint}", param=path, code="unknown_field")
    for phrase, ours in PHRASES:
        message = message.replace(phrase, ours)
    got = "" if kind in SAYS_IT_ALL else f"; got {_quote(detail['input'])}"
    return RequestError(f"{path} {message}{got}.", param=path)


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _quote(value: Any) -> str:
    text = _as_json(value) if isinstance(value, (bool, int, float, str)) else f"a {_json_type(value)}"
    return text if len(text) <= QUOTE_LIMIT else text[:QUOTE_LIMIT] + "…"


def _json_type(value: Any) -> str:
    return {dict: "object", list: "list", tuple: "list", type(None): "null"}.get(type(value), "value")


def _model_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """The body class at `location`, found through the annotations."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _first_model(model.model_fields[part].annotation) or model
    return model


def _first_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in typing.get_args(annotation) if (found := _first_model(inner))), None)
