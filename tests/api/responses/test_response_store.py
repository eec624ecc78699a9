"""The store of responses: its bounds, what several processes see of it, and what a dead one leaves."""

from __future__ import annotations

import threading
from pathlib import Path

import openai
import pytest
from api_server import make_state, serve
from calling_server import LongEngine

from stoker_runtime.api.responses.store import ResponseStore, Stored
from stoker_runtime.errors import NotFoundError, RequestError, StorageError

MODEL = "byte-model"


def stored(name: str, size: int, before: Stored | None = None) -> Stored:
    response = {"id": name, "status": "completed", "output": [{"text": "x" * size}]}
    return Stored(response, [], before.conversation() if before else ())


def test_store_is_bounded_and_can_be_off() -> None:
    engine = LongEngine()
    state = make_state(engine, response_store_bytes=6000)
    for running in serve(state, engine):
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client:
            made = [client.responses.create(model=MODEL, input="a", max_output_tokens=2).id for _ in range(6)]
            client.responses.retrieve(made[-1])
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(made[0])
            running.app.shelf.store.max_bytes = 0
            assert client.responses.create(model=MODEL, input="a", max_output_tokens=2).model_extra is not None
            for fields in ({"store": True}, {"background": True}, {"previous_response_id": made[-1]}):
                with pytest.raises(openai.BadRequestError, match="--response-store-bytes"):
                    client.responses.create(model=MODEL, input="a", extra_body=fields)


def test_what_is_kept_counts_the_conversation_that_it_keeps_alive() -> None:
    store = ResponseStore(10_000)
    first = stored("first", 4000)
    store.put(first)
    for at in range(20):
        store.put(stored(f"next-{at}", 10, first))
    kept = [name for name in ("first", *(f"next-{at}" for at in range(20))) if store.known(name)]
    assert kept == ["next-18", "next-19"]


def test_what_is_too_large_pushes_nothing_out_and_use_keeps_alive() -> None:
    store = ResponseStore(10_000)
    store.put(stored("small", 10))
    store.put(stored("large", 20_000))
    assert (store.known("small"), store.known("large")) == (True, False)
    store.put(stored("second", 4000))
    store.get("small")
    store.put(stored("third", 5900))
    assert [name for name in ("small", "second", "third") if store.known(name)] == ["small", "third"]


def test_events_count_and_go_with_their_response() -> None:
    store = ResponseStore(10_000)
    store.begin(stored("a", 10))
    store.advance(stored("a", 10), None, [(0, "e" * 9000)])
    store.put(stored("a", 10), [(1, "end")])
    assert store.events("a", -1) == ([(0, "e" * 9000), (1, "end")], True)
    store.put(stored("b", 2000))
    with pytest.raises(NotFoundError):
        store.events("a", -1)
    store.put(stored("a", 10))
    assert store.events("a", -1) == ([], True)


def test_what_runs_is_never_dropped() -> None:
    store = ResponseStore(3000)
    store.begin(stored("running", 2500))
    for at in range(4):
        store.put(stored(f"done-{at}", 2000))
    assert store.known("running")
    assert not store.known("done-2")
    with pytest.raises(RequestError, match="is not finished"):
        store.previous("running")


def test_several_processes_see_the_same(tmp_path: Path) -> None:
    one, two = (ResponseStore(10_000, f"{tmp_path}/responses", owner) for owner in (0, 1))
    one.begin(stored("a", 10))
    assert two.get("a").running
    assert not one.advance(stored("a", 10), {"id": "a", "status": "in_progress", "output": []}, [(0, "begun")])
    assert two.get("a").response["status"] == "in_progress"
    assert two.events("a", -1) == ([(0, "begun")], False)
    assert two.cancel("a")
    assert one.advance(stored("a", 10), None, [])
    one.put(stored("a", 10), [(1, "over")])
    assert two.events("a", 0) == ([(1, "over")], True)
    assert not two.cancel("a")
    two.discard("a")
    assert not one.known("a")
    assert one.advance(stored("a", 10), None, []), "what is gone need not be made"


def test_many_writers_at_once(tmp_path: Path) -> None:
    stores = [ResponseStore(1_000_000, f"{tmp_path}/responses", owner) for owner in range(4)]

    def write(owner: int) -> None:
        for at in range(50):
            stores[owner].put(stored(f"{owner}-{at}", 100))

    threads = [threading.Thread(target=write, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(stores[0].known(f"{owner}-{at}") for owner in range(4) for at in range(50))


def test_what_a_dead_process_was_making_has_failed(tmp_path: Path) -> None:
    dead, other = (ResponseStore(10_000, f"{tmp_path}/responses", owner) for owner in (0, 1))
    for store, name in ((dead, "lost"), (other, "alive")):
        store.begin(stored(name, 10))
        store.advance(stored(name, 10), None, [(0, "begun")])
    replacement = ResponseStore(10_000, f"{tmp_path}/responses", 0)
    found = replacement.get("lost")
    assert (found.response["status"], found.running) == ("failed", False)
    assert "process" in found.response["error"]["message"]
    events, over = replacement.events("lost", 0)
    assert over
    assert [number for number, _ in events] == [1]
    assert events[0][1].startswith("event: response.failed\ndata: {")
    assert replacement.get("alive").running


def test_a_store_that_fails_says_so(tmp_path: Path) -> None:
    store = ResponseStore(10_000, f"{tmp_path}/responses")
    store._database.execute("DROP TABLE responses")
    with pytest.raises(StorageError, match="store of responses failed"):
        store.put(stored("a", 10))
    with pytest.raises(StorageError):
        store.get("a")
