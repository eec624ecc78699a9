"""Adapters come to pods that serve and leave them again: no pod restarts, no stream is cut, a bad one harms nobody."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.adapters.peft_folder import Files, adapter
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.streams import streaming

FOLDERS: dict[str, Files] = {
    "sql": adapter(1),
    "law": adapter(2, rank=7, layers=11),
    "dora": adapter(3, use_dora=True),
    "wide": adapter(4, rank=33, layers=1),
    "other": adapter(5, hidden=640, layers=3),
    "empty": {"adapter_config.json": adapter(6)["adapter_config.json"]},
}
# Kubelets bring a ConfigMap to their pods about once a minute.
KUBELET_SECONDS = 240


@pytest.fixture
def adapters(place: Kube, given: Given) -> Iterator[stoker.Hub]:
    """A hub that has the adapters, too."""
    for name, files in FOLDERS.items():
        data = {file: base64.b64encode(content).decode() for file, content in files.items()}
        place.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "binaryData": data})
    flags = [f"--repo=acme/{name}=/adapters/{name}" for name in FOLDERS]
    mounts = {f"/adapters/{name}/{file}": (name, file) for name, files in FOLDERS.items() for file in files}
    with stoker.hub(place, given.images, "adapters", *flags, mounts=mounts) as hub:
        yield hub


def ask_for(place: Kube, *names: str) -> None:
    """Name other adapters in the spec."""
    listed = [{"name": name, "uri": f"hf://acme/{name}"} for name in names]
    patch = json.dumps({"spec": {"model": {"adapters": listed}}})
    place.kubectl("patch", "infsvc/model", "--type=merge", "-p", patch)


def states(place: Kube) -> dict[str, str]:
    found = place.get("infsvc", "model")["status"].get("adapters", ())
    return {each["name"]: each["state"] for each in found}


def pods(place: Kube) -> dict[str, Any]:
    """What would be another one after a rollout or a restart."""
    found = stoker.engine_pods(place, "model")
    return {
        pod["metadata"]["uid"]: [each["restartCount"] for each in pod["status"]["containerStatuses"]] for pod in found
    }


def text(place: Kube, model: str) -> str:
    answer = stoker.ask(stoker.url(place, "model"), model, prompt="The capital of France is", tokens=12)
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def stream_until_it_is_gone(base: str, model: str) -> int:
    """One stream after the other until the model is not there any more; how many came whole."""
    end, whole = time.monotonic() + KUBELET_SECONDS, 0
    while time.monotonic() < end:
        try:
            with streaming(base, model, clients=1, tokens=100, once=True):
                pass
        except AssertionError as error:
            if "status 404" not in str(error):
                raise
            return whole
        whole += 1
    raise AssertionError(f"{model} is still served after {KUBELET_SECONDS} s")


def test_adapters_come_and_go_while_streams_run(place: Kube, adapters: stoker.Hub) -> None:
    place.apply(stoker.service("model", model={"endpoint": adapters.endpoint, "adapters": []}))
    stoker.wait_ready(place, "model")
    base, before, plain = stoker.url(place, "model"), pods(place), text(place, "model")
    with streaming(base, "model", clients=2) as streams:
        streams.wait_running(1)
        ask_for(place, "sql", "law")
        eventually("both are served", lambda: set(states(place).values()) == {"Loaded"}, KUBELET_SECONDS)
        said = {name: text(place, name) for name in ("sql", "law")}
        assert len({plain, *said.values()}) == 3, "each says something else"
        ask_for(place, "law", "dora", "wide", "other", "empty")
        assert stream_until_it_is_gone(base, "sql") > 0, "streams that had begun came whole"
        bad = {"law": "Loaded", "dora": "Refused", "wide": "Refused", "other": "Refused", "empty": "Refused"}
        eventually("the bad ones are refused", lambda: states(place) == bad, KUBELET_SECONDS)
        streams.wait_more(2)
    found = {each["name"]: each["message"] for each in place.get("infsvc", "model")["status"]["adapters"]}
    assert "use_dora" in found["dora"]
    assert "its rank is 33" in found["wide"]
    assert "--max-lora-rank" in found["wide"]
    assert "[2, 640]" in found["other"]
    assert "adapter_model.safetensors" in found["empty"]
    conditions = stoker.conditions(place, "model")
    assert (conditions["Ready"]["status"], conditions["Degraded"]["status"]) == ("True", "False")
    assert (conditions["AdaptersReady"]["status"], conditions["AdaptersReady"]["reason"]) == ("False", "AdapterRefused")
    # Beside streams 16 bits round otherwise, so its words may not be those of before.
    assert text(place, "law") not in (plain, said["sql"]), "the one that stays is still itself"
    assert pods(place) == before, "no pod was restarted or replaced"

    ask_for(place, "sql", "law")
    place.kubectl("scale", "infsvc/model", "--replicas=2")
    stoker.wait_ready(place, "model")
    (uid,) = before
    (fresh,) = [pod for pod in stoker.engine_pods(place, "model") if pod["metadata"]["uid"] != uid]
    assert fresh["status"]["containerStatuses"][0]["ready"]
    eventually("both pods serve both", lambda: served_by(place) == {"sql": 2, "law": 2}, KUBELET_SECONDS)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        text(place, "dora")


def served_by(place: Kube) -> dict[str, int]:
    return {each["name"]: each["pods"] for each in place.get("infsvc", "model")["status"]["adapters"]}
