"""The OpenAPI document against the server that it describes, and the routes that are not built yet."""

from __future__ import annotations

import httpx
import openai
import pytest
from api_server import Running
from fastapi.routing import iter_route_contexts

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def test_what_is_served_is_what_is_listed(server: Running, http: httpx.Client) -> None:
    """Every path answers the methods that the document lists, and refuses every other one."""
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths) == {route.path_format for route in iter_route_contexts(server.app.api.routes)}
    for path, operations in paths.items():
        allowed = {method.upper() for method in operations}
        # A fixed path beside those with names answers what they do as well.
        named = {method.upper() for method in paths.get(f"{path.rpartition('/')[0]}/{{name}}", {})} - allowed
        for method in set(METHODS) - named:
            answer = http.request(method, path.replace("{name}", "nothing"))
            assert (answer.status_code == 405) == (method not in allowed), (method, path)
            assert "There is no route" not in answer.text, path
            if answer.status_code == 405:
                assert set(answer.headers["allow"].split(", ")) == allowed | named


def test_the_document_is_whole(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert all(operation["summary"] for operation in operations)
    known = document["components"]["schemas"]
    for operation in operations:
        for content in operation.get("requestBody", {}).get("content", {}).values():
            assert content["schema"]["$ref"].removeprefix("#/components/schemas/") in known
    assert list(document["paths"]["/v1/files"]["post"]["requestBody"]["content"]) == ["multipart/form-data"]


def test_queries_are_described(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    described = {
        path: [field["name"] for field in operations["get"].get("parameters", ()) if field["in"] == "query"]
        for path, operations in paths.items()
        if "get" in operations
    }
    assert {path: names for path, names in described.items() if names} == {
        "/v1/responses/{name}": ["stream", "starting_after"],
        "/v1/responses/{name}/input_items": ["limit", "order", "after"],
        "/v1/files": ["limit", "order", "after", "purpose"],
        "/v1/batches": ["limit", "order", "after"],
    }


@pytest.mark.parametrize("path", ["/v1/responses/a/b/cancel", "/v1/batches/a/b", "/v1/files/", "/v1", "//", "/docs/"])
def test_paths_near_to_one_that_exists(http: httpx.Client, path: str) -> None:
    assert http.post(path).status_code in (404, 405)


@pytest.mark.parametrize("path", ["load_lora_adapter", "unload_lora_adapter"])
def test_adapters_are_501_where_callers_may_not_change_them(server: Running, path: str) -> None:
    body = {"lora_name": "a", "lora_path": "/a"} if path.startswith("load") else {"lora_name": "a"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        with pytest.raises(openai.InternalServerError, match="--allow-runtime-lora-updating") as caught:
            client.post(f"/{path}", body=body, cast_to=object)
        assert caught.value.status_code == 501
