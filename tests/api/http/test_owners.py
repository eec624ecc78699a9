"""What one API key makes another neither sees nor touches: files, batches, stored responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from api_server import CLIENT, Running, wait_until
from batch_server import MODEL, batch_server, begin, request_line, results, upload, wait_for

FILE = "sk-ann-1 name=ann\nsk-ann-2 name=ann\nsk-bob name=bob\nsk-plain\nsk-few name=few quota=3/d\n"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "keys").write_text(FILE)
    with batch_server(tmp_path, api_key_file=str(tmp_path / "keys"), api_keys=("sk-flag",)) as found:
        yield found


def client(server: Running, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def call(server: Running, key: str, method: str, path: str, **fields: Any) -> httpx.Response:
    return CLIENT.request(method, server.url + path, headers={"authorization": f"Bearer {key}"}, **fields)


def test_files(shared: Running) -> None:
    with client(shared, "sk-ann-1") as ann, client(shared, "sk-bob") as bob:
        name = upload(ann, [request_line("a")])
        assert "owner" not in call(shared, "sk-ann-1", "GET", f"/v1/files/{name}").json()
        assert [file.id for file in ann.files.list()] == [name]
        assert list(bob.files.list()) == []
        unknown = name[:-1] + ("0" if name[-1] != "0" else "1")
        for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError) as other:
                ask(name)
            with pytest.raises(openai.NotFoundError) as missing:
                ask(unknown)
            assert other.value.status_code == missing.value.status_code
            assert str(other.value).replace(name, "ID") == str(missing.value).replace(unknown, "ID")
        with pytest.raises(openai.BadRequestError, match="No such File object"):
            bob.batches.create(input_file_id=name, endpoint="/v1/chat/completions", completion_window="24h")
        assert ann.files.content(name).text


def test_a_key_is_replaced_and_its_name_goes_on(shared: Running) -> None:
    with client(shared, "sk-ann-1") as old, client(shared, "sk-ann-2") as new:
        name = upload(old, [request_line("a")])
        assert new.files.retrieve(name).id == name
        assert new.files.delete(name).deleted


def test_a_key_without_a_name_owns_by_itself(shared: Running) -> None:
    with client(shared, "sk-plain") as plain, client(shared, "sk-flag") as flag, client(shared, "sk-bob") as bob:
        name = upload(plain, [request_line("a")])
        assert plain.files.retrieve(name).id == name
        for other in (flag, bob):
            with pytest.raises(openai.NotFoundError):
                other.files.retrieve(name)


def test_batches_and_their_results(shared: Running) -> None:
    with client(shared, "sk-ann-1") as ann, client(shared, "sk-bob") as bob:
        made = wait_for(ann, begin(ann, [request_line("a", n=1)]).id, "completed")
        raw = call(shared, "sk-ann-1", "GET", f"/v1/batches/{made.id}").json()
        assert not {"owner", "ending"} & raw.keys()
        assert [batch.id for batch in ann.batches.list()] == [made.id]
        assert list(bob.batches.list()) == []
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="No batch found"):
                ask(made.id)
        assert len(results(ann, made.output_file_id)) == 1
        with pytest.raises(openai.NotFoundError):
            results(bob, made.output_file_id)


def test_a_batch_runs_as_its_owner(shared: Running) -> None:
    """Its lines go on with the owner's responses, with nobody else's, and what they keep is the owner's."""
    with client(shared, "sk-ann-1") as ann, client(shared, "sk-bob") as bob:
        first = ann.responses.create(model=MODEL, input="x", max_output_tokens=3)
        url = "/v1/responses"
        body = {"model": MODEL, "input": "y", "max_output_tokens": 3, "previous_response_id": first.id, "store": True}
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        (good,) = results(ann, wait_for(ann, begin(ann, [line], url).id, "completed").output_file_id)
        made = good["response"]["body"]["id"]
        assert ann.responses.retrieve(made).previous_response_id == first.id
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(made)
        (bad,) = results(bob, wait_for(bob, begin(bob, [line], url).id, "completed").error_file_id)
        assert bad["response"]["body"]["error"]["code"] == "previous_response_not_found"


def test_responses(shared: Running) -> None:
    with client(shared, "sk-ann-1") as ann, client(shared, "sk-bob") as bob:
        made = ann.responses.create(model=MODEL, input="x", max_output_tokens=3)
        for ask in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found"):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            bob.responses.create(model=MODEL, input="y", previous_response_id=made.id)
        with client(shared, "sk-ann-2") as rotated:
            assert rotated.responses.retrieve(made.id).id == made.id


def test_background_responses(shared: Running) -> None:
    shared.engine.delay = 0.02
    with client(shared, "sk-ann-1") as ann, client(shared, "sk-bob") as bob:
        made = ann.responses.create(model=MODEL, input="x", background=True, max_output_tokens=500)
        for ask in (bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        assert call(shared, "sk-bob", "GET", f"/v1/responses/{made.id}?stream=true").status_code == 404
        assert ann.responses.retrieve(made.id).status in ("queued", "in_progress")
        assert ann.responses.cancel(made.id).status == "cancelled"


def test_a_name_of_ones_own_tells_nothing_of_others(shared: Running) -> None:
    """A request_id that somebody else took is free."""
    body = {"model": MODEL, "input": "x", "max_output_tokens": 3, "request_id": "mine"}
    ann, bob = (call(shared, key, "POST", "/v1/responses", json=body) for key in ("sk-ann-1", "sk-bob"))
    assert (ann.status_code, bob.status_code) == (200, 200)
    again = call(shared, "sk-ann-2", "POST", "/v1/responses", json=body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")
    call(shared, "sk-bob", "DELETE", "/v1/responses/resp_mine")
    assert call(shared, "sk-ann-1", "GET", "/v1/responses/resp_mine").status_code == 200


def test_quota_and_expiry_over_http(shared: Running, tmp_path: Path) -> None:
    statuses = [
        call(shared, "sk-few", "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 1}) for _ in range(4)
    ]
    assert [each.status_code for each in statuses] == [200, 200, 200, 429]
    assert statuses[3].json()["error"]["code"] == "quota_exceeded"
    assert 80_000 < int(statuses[3].headers["retry-after"]) <= 86_400
    assert call(shared, "sk-few", "GET", "/v1/models").status_code == 200
    (tmp_path / "keys").write_text(FILE.replace("sk-bob name=bob", "sk-bob name=bob expires=2021-02-03"))
    assert wait_until(lambda: call(shared, "sk-bob", "GET", "/v1/models").status_code == 401)
    assert call(shared, "sk-bob", "GET", "/v1/models").json()["error"]["code"] == "expired_api_key"


def test_what_an_open_server_made_is_nobodys(tmp_path: Path) -> None:
    with batch_server(tmp_path) as server, client(server, "any") as anybody:
        name = upload(anybody, [request_line("a")])
        assert anybody.files.retrieve(name).id == name
    with batch_server(tmp_path, api_keys=("sk-flag",)) as server, client(server, "sk-flag") as somebody:
        with pytest.raises(openai.NotFoundError):
            somebody.files.retrieve(name)
        assert list(somebody.files.list()) == []
