"""Several ranks in one pod (spec.parallelism): on CPUs each is a process, and they are one engine to all that asks."""

from __future__ import annotations

import base64
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.binaries import Say
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.ranks.tiny_model import CONTEXT, tiny_llama
from e2e.scenarios.streams import streaming

PROMPT = "The capital of France is"
CLIENTS = 3
KILL_ONE = """
import os, signal
for name in filter(str.isdigit, os.listdir('/proc')):
    try:
        words = open(f'/proc/{name}/cmdline').read().split(chr(0))
    except OSError:
        continue
    if 'MODULE' in words:
        os.kill(int(name), signal.SIGKILL)
        print(name)
        break
"""
# Every rank but the one that schedules is a process of this name.
KILL_A_RANK = KILL_ONE.replace("MODULE", "stoker_runtime.ranks.follower")
KILL_AN_ENGINE = KILL_ONE.replace("MODULE", "stoker_runtime.engine")
GENERATED = re.compile(r'^vllm:generation_tokens_total{engine="(\d)".*} (\S+)$', re.MULTILINE)
READY = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}{"\\n"}'


@pytest.fixture
def tiny(place: Kube, given: Given) -> Iterator[dict[str, Any]]:
    """What a service of the tiny model says of it."""
    files = tiny_llama(11)
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    place.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny"}, "binaryData": data})
    mounts = {f"/tiny/{file}": ("tiny", file) for file in files}
    with stoker.hub(place, given.images, "tiny-hub", "--repo=acme/tiny=/tiny", mounts=mounts) as hub:
        yield {"uri": "hf://acme/tiny", "endpoint": hub.endpoint, "files": {"allow": ["*"]}}


def of_ranks(name: str, model: dict[str, Any], **parallelism: int) -> dict[str, Any]:
    runtime = {"contextLength": CONTEXT, "args": ["--dtype", "float32"]}
    room = {"memory": "3Gi"}
    return stoker.service(name, model=model, runtime=runtime, resources=room, parallelism=parallelism)


def text(place: Kube, name: str, tokens: int) -> str:
    return str(stoker.ask(stoker.url(place, name), name, prompt=PROMPT, tokens=tokens)["choices"][0]["text"])


@contextmanager
def ready_watched(place: Kube, name: str) -> Iterator[list[str]]:
    """What Ready was in each version of the service there was meanwhile, repetitions left out; whole at the end."""
    process = place.start("get", "infsvc", name, "--watch", "-o", READY)
    seen: list[str] = []
    try:
        yield seen
    finally:
        process.terminate()
        told = process.communicate(timeout=30)[0].split()
        seen += [word for at, word in enumerate(told) if at == 0 or word != told[at - 1]]


def engine(place: Kube, name: str) -> tuple[str, int, bool]:
    """Its pod's name; how often the engine's container began anew, and whether it is ready."""
    (pod,) = stoker.engine_pods(place, name)
    (container,) = (each for each in pod["status"]["containerStatuses"] if each["name"] == "engine")
    return pod["metadata"]["name"], container["restartCount"], container["ready"]


def columns(place: Kube, name: str) -> dict[str, str]:
    """The service's row of `kubectl get`, by the heads of its columns."""
    head, row = place.kubectl("get", "infsvc", name).splitlines()
    return dict(zip(head.split(), row.split(), strict=False))


def test_two_ranks_are_one_pod_and_end_together(place: Kube, tiny: dict[str, Any], say: Say) -> None:
    place.apply(of_ranks("two", tiny, tensor=2), of_ranks("one", tiny))
    for name in ("two", "one"):
        stoker.wait_ready(place, name)
    alone = text(place, "one", 60)
    assert len(set(alone)) > 5, "a text of one letter would tell little"
    assert text(place, "two", 60) == alone
    row = columns(place, "two")
    assert (row["READY"], row["SERVABLE"], row["REASON"]) == ("True", "True", "Serving")
    assert (row["REPLICAS"], row["UPDATED"], row["GPUS"]) == ("1", "1", "0"), "one pod, and no GPU"

    pod, began, _ = engine(place, "two")
    with ready_watched(place, "two") as told:
        ends_with_an_error = pytest.raises(AssertionError, match=f"{CLIENTS} of {CLIENTS} streams")
        base = stoker.url(place, "two")
        with ends_with_an_error, streaming(base, "two", clients=CLIENTS, tokens=CONTEXT - 60, once=True) as streams:
            streams.wait_running(CLIENTS)
            watch = stoker.Stopwatch()
            assert place.run_in(pod, KILL_A_RANK).strip(), "there is no second rank"
            eventually("every stream has ended", lambda: len(streams.broken) == CLIENTS, 20, every=0.05)
            say(f"ranks: one was killed, and {CLIENTS} streams ended with an error within {watch.seconds:.1f} s")
        eventually("it is not Ready", lambda: stoker.conditions(place, "two")["Ready"]["status"] == "False", 60)
        assert stoker.conditions(place, "two")["Servable"]["status"] == "False"

        def healed() -> bool:
            status = stoker.conditions(place, "two")["Ready"]["status"]
            found = engine(place, "two")
            assert status != "True" or found == (pod, began + 1, True), f"Ready while its pod is {found}"
            return bool(status == "True")

        eventually("it is Ready", healed, 240, every=0.2)
        say(f"ranks: Ready {watch.seconds:.1f} s after one was killed")
        assert text(place, "two", 60) == alone
    assert told == ["True", "False", "True"], "Ready at a time when nobody answered"
    assert engine(place, "one")[1:] == (0, True)


def test_two_engines_are_one_pod_that_shares_out_requests(place: Kube, tiny: dict[str, Any], say: Say) -> None:
    """`parallelism.data`: each engine answers, with one text, and one that dies begins the pod's container anew."""
    place.apply(of_ranks("pair", tiny, data=2))
    stoker.wait_ready(place, "pair")
    base = stoker.url(place, "pair")
    alone = text(place, "pair", 60)
    with streaming(base, "pair", clients=CLIENTS, tokens=40) as streams:
        eventually("each client had four answers", lambda: streams.whole >= 4 * CLIENTS, 120)
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as page:
        generated = dict(GENERATED.findall(page.read().decode()))
    assert generated.keys() == {"0", "1"}
    assert min(map(float, generated.values())) >= 2 * 40, f"one engine had all: {generated}"
    pod, began, _ = engine(place, "pair")
    assert place.run_in(pod, KILL_AN_ENGINE).strip(), "there is no engine"
    watch = stoker.Stopwatch()
    eventually("its container began anew", lambda: engine(place, "pair") == (pod, began + 1, True), 240)
    stoker.wait_ready(place, "pair")
    say(f"ranks: two engines were Ready {watch.seconds:.1f} s after one was killed")
    assert text(place, "pair", 60) == alone


def test_a_number_that_does_not_divide_is_told_with_those_that_do(place: Kube, say: Say) -> None:
    """SmolLM2-135M has nine heads."""
    place.apply(stoker.service("model"))
    stoker.wait_ready(place, "model")
    alone = text(place, "model", 6)
    assert "Paris" in alone
    place.merge("infsvc", "model", {"spec": {"parallelism": {"tensor": 2}, "resources": {"memory": "3Gi"}}})
    said = stoker.wait_reason(place, "model", "CrashLoop")["message"]
    assert "num_attention_heads is 9" in said
    assert "sizes that work for this model: 1, 3" in said
    assert stoker.conditions(place, "model")["Servable"]["status"] == "True", "the revision before answers"
    watch = stoker.Stopwatch()
    place.merge("infsvc", "model", {"spec": {"parallelism": {"tensor": 3}}})
    stoker.wait_ready(place, "model")
    say(f"ranks: three of them, of SmolLM2, Ready {watch.seconds:.0f} s after the number was corrected")
    assert text(place, "model", 6) == alone
