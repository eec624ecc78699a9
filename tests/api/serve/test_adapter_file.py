"""A file that lists adapters, followed in front of an engine of a test; a real server is in
tests/api/openai/test_adapters.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from stoker_runtime.errors import ConfigError
from stoker_runtime.fetch.manifest import Manifest, ManifestFile
from stoker_runtime.serve import adapter_file
from stoker_runtime.serve.adapter_file import AdapterFile, read_list


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_file, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(adapter_file, "RETRY_SECONDS", 0.0)


def write(file: Path, *adapters: tuple[str, ...]) -> None:
    """As a kubelet does it: another file takes the name."""
    keys = ("name", "path", "digest")
    listed = [dict(zip(keys, each, strict=False)) for each in adapters]
    fresh = file.with_suffix(f".{random.random()}")
    fresh.write_text(json.dumps({"adapters": listed}))
    fresh.rename(file)


def states(followed: AdapterFile) -> dict[str, str]:
    return {report["name"]: report["state"] for report in followed.reports()}


async def until(done: Any) -> None:
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.001)


async def follow(file: Path, engine: FakeEngine, *names: str) -> tuple[AdapterFile, asyncio.Task[None]]:
    followed = AdapterFile(str(file), names or ("tiny",))
    await followed.start(engine)
    return followed, asyncio.create_task(followed.run())


def served(engine: FakeEngine) -> dict[str, str]:
    return {name: adapter.path for name, adapter in engine.adapters.items()}


def test_what_the_file_names_is_served_and_nothing_else(tmp_path: Path) -> None:
    file, engine = tmp_path / "list.json", FakeEngine()
    write(file, ("ada", "/a"), ("bo", "bad/b"), ("tiny", "/t"))

    async def run() -> None:
        await engine.load_adapter("own", "/own")
        followed, task = await follow(file, engine)
        assert states(followed) == {"ada": "loaded", "bo": "refused", "tiny": "refused"}
        assert [each["message"] for each in followed.reports()[1:]] == [
            "bad/b: not this one.", "'tiny' is the model's own name.",
        ]  # fmt: skip
        write(file, ("bo", "/b"), ("ada", "/a2"))
        await until(lambda: served(engine) == {"own": "/own", "ada": "/a2", "bo": "/b"})
        write(file, ("ada", "bad/a3"))
        await until(lambda: states(followed) == {"ada": "refused"} and "bo" not in engine.adapters)
        assert served(engine) == {"own": "/own", "ada": "/a2"}, "what cannot be read takes nobody's place"
        write(file)
        await until(lambda: served(engine) == {"own": "/own"})
        task.cancel()

    asyncio.run(run())


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    file, engine = tmp_path / "list.json", FakeEngine()
    write(file, ("ada", "/a"))

    async def run() -> None:
        followed, task = await follow(file, engine)
        file.write_text('{"adapters": [{"nam')
        await until(lambda: followed.problem)
        assert str(file) in followed.problem
        assert served(engine) == {"ada": "/a"}
        write(file, ("bo", "/b"))
        await until(lambda: served(engine) == {"bo": "/b"})
        assert followed.problem == ""
        task.cancel()

    asyncio.run(run())


def test_a_folder_is_what_was_published_or_it_is_not_read(tmp_path: Path) -> None:
    folder, file, engine = tmp_path / "published", tmp_path / "list.json", FakeEngine()
    folder.mkdir()
    content = random.randbytes(50)
    (folder / "a").write_bytes(b"x" * 50)
    manifest = Manifest("hf://o/a", "c0", {"a": ManifestFile(hashlib.sha256(content).hexdigest(), 50, 1)})
    write(file, ("ada", str(folder), manifest.digest))

    async def run() -> None:
        followed, task = await follow(file, engine)
        assert followed.reports()[0]["reason"] == "NotPublished"
        manifest.write(folder)
        await until(lambda: followed.reports()[0]["reason"] == "ChecksumMismatch")
        assert "a has other bytes" in followed.reports()[0]["message"]
        assert not engine.adapters
        (folder / "a").write_bytes(content)
        await until(lambda: states(followed) == {"ada": "loaded"})
        task.cancel()

    asyncio.run(run())


def test_several_processes_follow_one_file(tmp_path: Path) -> None:
    """One engine; who is second finds an adapter served, or being loaded, and does not unload what it did not name."""
    file, engine = tmp_path / "list.json", FakeEngine()
    write(file, ("ada", "/a"), ("bo", "/b"))

    async def run() -> None:
        pairs = await asyncio.gather(follow(file, engine), follow(file, engine))
        await until(lambda: all(states(each) == {"ada": "loaded", "bo": "loaded"} for each, _ in pairs))
        write(file, ("bo", "/b2"))
        await until(lambda: all(states(each) == {"bo": "loaded"} for each, _ in pairs))
        assert served(engine) == {"bo": "/b2"}
        for _, task in pairs:
            task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "no list of adapters"),
        ('{"adapters": [{"name": "a"}]}', "no list of adapters"),
        ('{"adapters": [{"name": "a", "path": "/a", "rank": 3}]}', "no list of adapters"),
        ('{"adapters": [{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]}', "names 'a' twice"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "list").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_list(tmp_path / "list")
