"""`stoker serve ORG/NAME` and its like: what is here wins, the user's cache is used, the rest is fetched into it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download
from tests import real_models

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError, StokerError
from stoker_runtime.fetch.by_name import DESCRIPTIONS, locate, located
from stoker_runtime.fetch.download import Downloader
from stoker_runtime.fetch.hub.cache import HubCache
from stoker_runtime.fetch.reference import hub_name
from stoker_runtime.offline.options import engine_options
from stoker_runtime.settings.parse import parse

ROOT = Path(__file__).parents[3]
Checkpoint = Callable[[str], Path]
INDEX = "model.safetensors.index.json"
GENERATES = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
}


@pytest.fixture
def repo(hub: Any, model: Path, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's model as one that generates, and a process that asks that hub alone."""
    (model / "config.json").write_text(json.dumps(GENERATES))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (model / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    return model


def asked(hub: Any) -> list[str]:
    """The files whose bytes were asked for."""
    return sorted(entry["path"].rsplit("/", 1)[1] for entry in hub.log if "/resolve/" in entry["path"])


@pytest.mark.parametrize(
    ("text", "place", "file", "quantization"),
    [
        ("Some-Org/model-3.1B_x", "Some-Org/model-3.1B_x", "", ""),
        ("hf://a/b", "a/b", "", ""),
        ("a/b:IQ3_XS", "a/b", "", "IQ3_XS"),
        ("a/b/deep/er.gguf", "a/b", "deep/er.gguf", ""),
    ],
)
def test_names_of_the_hub(text: str, place: str, file: str, quantization: str) -> None:
    found = hub_name(text)
    assert found is not None
    assert (found.place, found.file, found.quantization) == (place, file, quantization)


@pytest.mark.parametrize(
    "text", ["a", "/a/b", "./a/b", "../a/b", "~/a", "a/b.gguf", "a/b/c", "a/b.json", "a/b@main", ""]
)
def test_what_is_no_name_of_the_hub_is_a_path(text: str) -> None:
    assert hub_name(text) is None
    assert locate(text) == text


def test_a_model_is_fetched_into_the_users_cache_and_then_takes_no_network(hub: Any, repo: Path) -> None:
    said: list[str] = []
    path = Path(locate("acme/tiny", say=said.append))
    commit = hub.find("acme/tiny", "main").commit()
    assert path == HubCache("acme/tiny").snapshot(commit)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    wanted = ["config.json", *shards, INDEX, "tokenizer.json"]
    assert sorted(child.name for child in path.iterdir()) == wanted
    assert any("5 files" in text and "4.0 MiB" in text for text in said)
    assert not list(HubCache("acme/tiny").folder.glob(".partial*"))
    # What other programs find is what the library would have put there.
    assert (
        Path(snapshot_download("acme/tiny", endpoint=hub.url, local_files_only=True, cache_dir=constants.HF_HUB_CACHE))
        == path
    )
    hub.log.clear()
    assert locate("acme/tiny", say=said.append) == str(path)
    assert locate("acme/tiny", commit) == str(path)
    assert hub.log == []
    assert "from the hub cache" in said[-1]


def test_a_draft_model_is_fetched_as_the_model_is(hub: Any, repo: Path, tmp_path: Path) -> None:
    speculation = {"model": "acme/tiny", "revision": "main", "num_speculative_tokens": 3}
    config = located(EngineConfig(str(tmp_path), speculative_config=json.dumps(speculation)), say=lambda _: None)
    path = str(HubCache("acme/tiny").snapshot(hub.find("acme/tiny", "main").commit()))
    assert json.loads(config.speculative_config) == {"model": path, "num_speculative_tokens": 3}
    assert located(config) == config
    with pytest.raises(ConfigError, match="revision"):
        located(EngineConfig(str(tmp_path), speculative_config=json.dumps(speculation | {"model": path})))


def test_a_cache_that_the_library_filled_is_served_without_network(hub: Any, repo: Path) -> None:
    path = snapshot_download("acme/tiny", endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    hub.log.clear()
    assert locate("acme/tiny") == path
    assert hub.log == []


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors", "config.json", "tokenizer.json"])
def test_what_the_cache_lacks_is_fetched_and_nothing_else(hub: Any, repo: Path, lost: str) -> None:
    path = Path(locate("acme/tiny"))
    blob = (path / lost).resolve()
    (path / lost).unlink()
    blob.unlink()
    hub.log.clear()
    assert locate("acme/tiny") == str(path)
    assert asked(hub) == [lost]
    assert (path / lost).read_bytes() == (repo / lost).read_bytes()


def test_a_download_that_broke_goes_on_where_it_was(hub: Any, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Downloader._attempt

    def breaks(self: Downloader, file: Any, part: Any) -> None:
        hub.faults.bytes_per_second = 4_000_000
        threading.Timer(0.5, self._stop.set).start()
        attempt(self, file, part)

    monkeypatch.setattr(Downloader, "_attempt", breaks)
    with pytest.raises(StokerError, match="goes on from here"):
        locate("acme/tiny")
    monkeypatch.undo()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(repo.parent / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.faults.bytes_per_second = 0
    hub.log.clear()
    path = Path(locate("acme/tiny"))
    assert any(entry["range"] for entry in hub.log)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        assert (path / name).read_bytes() == (repo / name).read_bytes()


def test_wrong_bytes_never_reach_the_cache(hub: Any, repo: Path) -> None:
    hub.faults.corrupt_times = -1
    with pytest.raises(StokerError, match="arrived with"):
        locate("acme/tiny")
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


def test_a_folder_here_wins_and_that_is_said(hub: Any, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    said: list[str] = []
    assert locate("acme/tiny", say=said.append) == "acme/tiny"
    assert "acme/tiny is a path on this machine, which wins; hf://acme/tiny means the hub's" in said[0]
    assert hub.log == []
    assert Path(locate("hf://acme/tiny")).is_dir()
    assert hub.log != []


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_nothing_for_a_path(hub: Any, repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in repo.glob("*.*"):
        (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text(json.dumps(GENERATES | {"num_hidden_layers": 5}))
    hub.add("acme/tiny@experiment/7", other)
    branch = Path(locate("acme/tiny", "experiment/7"))
    assert json.loads((branch / "config.json").read_text())["num_hidden_layers"] == 5
    assert Path(locate("acme/tiny")) != branch
    hub.log.clear()
    assert locate("acme/tiny", "experiment/7") == str(branch)
    assert hub.log == []
    for model in (str(branch), "shape:qwen3-0.6b", "./nowhere"):
        with pytest.raises(ConfigError, match="leave it out"):
            locate(model, "main")
    with pytest.raises(ModelError, match="no revision 'v8'"):
        locate("acme/tiny", "v8")


def test_what_stoker_fetch_published_is_served(hub: Any, repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker_cli", "fetch", "hf://acme/tiny", "--endpoint", hub.url]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), check=True)
    hub.log.clear()
    assert locate("acme/tiny") == done.stdout.strip()
    assert hub.log == []


def test_one_gguf_by_its_quantization_or_its_name(hub: Any, repo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ggufs"
    (folder / "big").mkdir(parents=True)
    for name in (
        "m.Q4_K_M",
        "m.Q4_K_S",
        "m-IQ4_K",
        "mmproj-Q4_K_S",
        "big/m-Q8_0-00001-of-00002",
        "big/m-Q8_0-00002-of-00002",
    ):
        (folder / f"{name}.gguf").write_bytes(b"GGUF" + name.encode())
    hub.add("acme/ggufs", folder)
    assert Path(locate("acme/ggufs:q4_k_s")).name == "m.Q4_K_S.gguf"
    assert Path(locate("acme/ggufs/m-IQ4_K.gguf")).name == "m-IQ4_K.gguf"
    both = Path(locate("acme/ggufs:Q8_0"))
    assert both.name == "m-Q8_0-00001-of-00002.gguf"
    assert both.with_name("m-Q8_0-00002-of-00002.gguf").is_file()
    assert len(asked(hub)) == 4
    hub.log.clear()
    assert locate("acme/ggufs:Q8_0") == str(both)
    assert hub.log == []
    with pytest.raises(ModelError, match=r"6 GGUF|5 GGUF.*acme/ggufs:Q4_K_M"):
        locate("acme/ggufs")
    with pytest.raises(ModelError, match=r"there is no GGUF file of Q4_K\. It has: .*m\.Q4_K_M"):
        locate("acme/ggufs:Q4_K")


def test_pickles_are_refused_by_name(hub: Any, repo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickles"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    hub.add("acme/pickles", folder)
    with pytest.raises(ModelError, match=r"pickles alone \(pytorch_model\.bin\)"):
        locate("acme/pickles")
    (folder / "model.safetensors").write_bytes(b"12345678")
    assert sorted(path.name for path in Path(locate("acme/pickles")).iterdir()) == ["config.json", "model.safetensors"]


def test_errors_say_what_was_asked_where(hub: Any, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=rf"no repository 'acme/tinny' at {hub.url}.*Nor is there a folder"):
        locate("acme/tinny")
    hub.gated.add("acme/tiny")
    with pytest.raises(ModelError, match="set HF_TOKEN; if it is gated, accept its terms there"):
        locate("acme/tiny")
    hub.gated.clear()
    hub.token = "hf_right"
    with pytest.raises(ModelError, match="needs a token: set HF_TOKEN"):
        locate("acme/tiny")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match="rejected the token") as failure:
        locate("acme/tiny")
    assert "hf_wrong" not in failure.value.message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StokerError, match=r"HF_HUB_OFFLINE is set.*unset HF_HUB_OFFLINE"):
        locate("acme/tiny")


def test_a_cache_that_may_lack_something_is_completed_or_served_when_the_hub_is_gone(
    hub: Any, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    path = Path(locate("acme/tiny"))
    (repo / "modules.json").write_text("[]")
    hub.log.clear()
    assert locate("acme/tiny") != str(path)
    assert asked(hub) == ["modules.json"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (Path(locate("acme/tiny")) / "modules.json").is_file()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("stoker_runtime.fetch.download.Patience.wait", lambda self, failures, asked: 0.01)
    said: list[str] = []
    assert (Path(locate("acme/tiny", say=said.append)) / "modules.json").is_file()
    assert any("cannot be reached" in text and "What the cache holds is served" in text for text in said)


def test_a_description_takes_no_weights_and_the_branchs_name_from_no_whole_model(hub: Any, repo: Path) -> None:
    path = Path(locate("acme/tiny", only=DESCRIPTIONS))
    assert sorted(child.name for child in path.iterdir()) == ["config.json", INDEX, "tokenizer.json"]
    assert locate("acme/tiny") == str(path)
    (repo / "config.json").write_text(json.dumps(GENERATES | {"num_hidden_layers": 9}))
    newer = locate("acme/tiny", only=DESCRIPTIONS)
    assert newer != str(path)
    hub.log.clear()
    assert locate("acme/tiny") == str(path)
    assert hub.log == []


def test_a_tokenizer_by_name_brings_the_tokenizer(hub: Any, repo: Path) -> None:
    config = located(EngineConfig(model="shape:qwen3-0.6b", tokenizer="acme/tiny"))
    assert sorted(path.name for path in Path(config.tokenizer).iterdir()) == ["config.json", INDEX, "tokenizer.json"]
    hub.log.clear()
    assert located(EngineConfig(model="shape:qwen3-0.6b", tokenizer="acme/tiny")) == config
    assert hub.log == []


def test_two_processes_fetch_once(hub: Any, repo: Path, tmp_path: Path) -> None:
    hub.faults.bytes_per_second = 6_000_000
    code = "from stoker_runtime.fetch.by_name import locate; print(locate('acme/tiny'))"
    env = environment(tmp_path, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "shared"))
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) for _ in "ab"]
    found = {run.communicate(timeout=60)[0] for run in runs}
    assert len(found) == 1
    assert len(asked(hub)) == 5


def environment(home: Path, **changes: str) -> dict[str, str]:
    """Of a process: the variables of this one, and a home of its own."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "STOKER_"))}
    return base | {"HOME": str(home / "home"), "NO_PROXY": "127.0.0.1,localhost"} | changes


def test_llm_and_bench_take_a_name(
    hub: Any, repo: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker_runtime import LLM, SamplingParams
    from stoker_runtime.bench.engine_flags import engine_config, parser

    folder = tiny_checkpoint("llama")
    hub.add("acme/llama@v5", folder)
    with LLM("acme/llama", revision="v5", dtype="float32", device="cpu", max_model_len=64) as llm:
        ids = llm.generate_tokens([[3, 4, 5]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=64) as llm:
        assert llm.generate_tokens([[3, 4, 5]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)) == ids
    args = parser().parse_args(["acme/llama", "--revision", "v5", "--device", "cpu"])
    assert (Path(engine_config(args).model) / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="leave it out"):
        LLM(str(folder), revision="v5")


def test_info_of_a_name_fetches_what_describes_it(
    hub: Any, repo: Path, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    hub.add("acme/qwen", tiny_checkpoint("qwen3"))
    env = environment(tmp_path, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"))
    command = [sys.executable, "-m", "stoker_cli", "info", "acme/qwen", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Qwen3ForCausalLM" in done.stdout
    assert "model.safetensors" not in asked(hub)


def test_a_server_takes_a_name_shows_progress_and_answers_to_it(hub: Any, repo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "smol"
    folder.mkdir()
    (folder / "SmolLM2.Q4_1.gguf").symlink_to(real_models.smollm2())
    (folder / "SmolLM2.Q8_0.gguf").write_bytes(b"GGUF")
    hub.add("acme/smol", folder)
    hub.token = "hf_server"
    env = environment(tmp_path, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"), HF_TOKEN="hf_server")
    flags = ["--device", "cpu", "--port", "0", "--max-model-len", "256", "--log-json"]
    command = [sys.executable, "-m", "stoker_cli", "serve", "acme/smol:Q4_1", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        assert server.stderr is not None
        lines: list[dict[str, Any]] = []
        try:
            deadline = time.monotonic() + 200
            while not any(line["message"].startswith("ready") for line in lines) and time.monotonic() < deadline:
                text = server.stderr.readline()
                assert text, "the server ended: " + json.dumps(lines[-3:])
                lines.append(json.loads(text))
            url = next(line["message"] for line in lines if "listening on" in line["message"]).split()[-1]
            with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
                assert json.load(answer)["data"][0]["id"] == "acme/smol:Q4_1"
        finally:
            server.terminate()
            server.wait(30)
    messages = [line["message"] for line in lines]
    assert any("fetching 1 file, " in text for text in messages)
    assert not any("hf_server" in text for text in messages)
    assert asked(hub) == ["SmolLM2.Q4_1.gguf"]
    assert not list((tmp_path / "hf").rglob("*Q8_0*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_fetches_ends_at_a_signal_and_goes_on_the_next_time(
    hub: Any, repo: Path, tmp_path: Path, number: int
) -> None:
    hub.faults.bytes_per_second = 300_000
    env = environment(tmp_path, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "hf"))
    command = [sys.executable, "-m", "stoker_cli", "serve", "acme/tiny", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.glob("hf/hub/*/.partial-*/*")):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.05)
        server.send_signal(number)
        assert server.wait(15) == 1
        assert server.stderr is not None
        said = server.stderr.read()
    assert "could not start: Stopped; the next run goes on from here." in said
    assert "Traceback" not in said
    assert any(path.stat().st_size for path in tmp_path.glob("hf/hub/*/.partial-*/*"))


def test_a_token_is_never_quoted() -> None:
    """Neither an option nor a flag takes one; what was given stands in no message."""
    for given in ({"hf_token": "hf_secret77"}, {"download_dir": "/models", "hf_token": "hf_secret77"}):
        with pytest.raises(ConfigError, match=r"HF_TOKEN|HF_HOME") as failure:
            engine_options(given)
        assert "secret77" not in failure.value.message
    for arguments in (["m", "--hf-token", "hf_secret77"], ["m", "--hf_token=hf_secret77"]):
        with pytest.raises(ConfigError, match="HF_TOKEN") as failure:
            parse(arguments, {})
        assert "secret77" not in failure.value.message
