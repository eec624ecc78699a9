"""fetch/registry/layout.py and image.py: a model as an image, what a registry then says of it, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e.registry.server import Registry

from stoker_runtime.fetch import cli
from stoker_runtime.fetch.registry import layout

NAME = f"team-{secrets.token_hex(2)}/models/mounted"
Run = Callable[..., dict[str, Any]]

# Python before 3.11.4 has no filters.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


@pytest.fixture
def run(tmp_path: Path, registry: Registry) -> Run:
    """`stoker fetch` with these arguments: its report, and its exit status in it."""

    def run(*arguments: str) -> dict[str, Any]:
        log = tmp_path / "report.json"
        status = cli.main([*arguments, "--termination-log", str(log), "--retries", "2"])
        return {**json.loads(log.read_text()), "status": status}

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    noise = random.Random(11)
    sizes = {"model-00001-of-00002.safetensors": 300_001, "model-00002-of-00002.safetensors": 200_000}
    for name, size in (sizes | {"deep/tokenizer.json": 2001}).items():
        (folder / name).write_bytes(noise.randbytes(size))
    config = {"num_hidden_layers": 3, "num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 768}))
    return folder


def written(run: Run, model: Path, image: Path, dest: Path) -> dict[str, Any]:
    found = run("--uri", f"file://{model}", "--dest", str(dest), "--image", str(image))
    assert found["status"] == 0, found
    return found


def blob(image: Path, digest: str) -> Path:
    return image / "blobs" / "sha256" / digest.removeprefix("sha256:")


def manifest_of(image: Path) -> tuple[str, dict[str, Any]]:
    [entry] = json.loads((image / "index.json").read_bytes())["manifests"]
    return entry["digest"], json.loads(blob(image, entry["digest"]).read_bytes())


def push(registry: Registry, image: Path, tag: str) -> str:
    """As a tool does that pushes a layout."""
    digest, manifest = manifest_of(image)
    for item in (manifest["config"], *manifest["layers"]):
        registry.blobs[item["digest"]] = blob(image, item["digest"]).read_bytes()
    body = blob(image, digest).read_bytes()
    for at in (tag, digest):
        registry.manifests[f"/v2/{NAME}/manifests/{at}"] = body
    return digest


def test_an_image_unpacks_to_the_model_and_is_the_same_whoever_writes_it(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_SMALL_BYTES", 150_000)
    image = tmp_path / "image"
    report = written(run, model, image, tmp_path / "models")
    digest, manifest = manifest_of(image)
    for file in (image / "blobs" / "sha256").iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    config = json.loads(blob(image, manifest["config"]["digest"]).read_bytes())
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert len(manifest["layers"]) == 3, "the small files, and each large one"
    root = tmp_path / "root"
    for layer in manifest["layers"]:
        file = blob(image, layer["digest"])
        assert file.stat().st_size == layer["size"]
        with tarfile.open(file) as tar:
            assert all(item.mode == 0o644 and item.isreg() for item in tar)
            tar.extractall(root, **SAFELY)
    assert run("--verify-only", "--path", str(root), "--digest", report["digest"])["status"] == 0
    assert run("--verify-only", "--path", str(root), "--full")["status"] == 0
    assert (root / "deep" / "tokenizer.json").read_bytes() == (model / "deep" / "tokenizer.json").read_bytes()
    for file in model.rglob("*"):
        os.utime(file, (1, 1))
    shutil.copytree(model, tmp_path / "another")
    written(run, tmp_path / "another", image, tmp_path / "other models")
    assert manifest_of(image)[0] != digest, "the manifest in it names its source"
    shutil.rmtree(tmp_path / "models")
    written(run, model, image, tmp_path / "models")
    assert manifest_of(image)[0] == digest
    assert sorted(path.name for path in tmp_path.glob("*image*")) == ["image"], "nothing half-made is left"


def test_what_an_image_tells_is_what_the_fetch_reported(
    run: Run, registry: Registry, model: Path, tmp_path: Path
) -> None:
    known = json.loads((model / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    known |= {"vocab_size": 77, "intermediate_size": 96, "rms_norm_eps": 1e-6}
    (model / "config.json").write_text(json.dumps(known))
    report = written(run, model, tmp_path / "image", tmp_path / "models")
    digest = push(registry, tmp_path / "image", "v3")
    told = run("--resolve-image", "--uri", f"oci://{registry.host}/{NAME}:v3", "--revision", "main")
    assert told == {
        "status": 0, "resolvedRevision": digest, "digest": digest, "bytes": report["bytes"], "path": "", "serve": "",
        "shape": report["shape"],
    }  # fmt: skip
    assert told["shape"]["kvHeads"] == 2
    assert told["shape"]["weights"]["kinds"]["fp8"]["ranks"][0] > 0
    # As builders push for one platform: an index, with an attestation beside the image. The index is what is pinned.
    image = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1}
    made = {"digest": f"sha256:{'0' * 64}", "platform": {"os": "unknown", "architecture": "unknown"}}
    index = registry.put(NAME, "built", {"manifests": [made, image | {"platform": {"os": "linux"}}]})
    there = f"oci://{registry.host}/{NAME}"
    assert run("--resolve-image", "--uri", f"{there}:built")["digest"] == index
    assert run("--resolve-image", "--uri", f"{there}@{index}")["shape"] == report["shape"]
    # What a look-up found is what is asked for after it.
    assert run("--resolve-image", "--uri", f"{there}:v3", "--revision", index)["digest"] == index


def test_an_image_without_the_label_tells_the_size_of_its_layers(run: Run, registry: Registry) -> None:
    config = json.dumps({"config": None}).encode()
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    registry.blobs[digest] = config
    kind = "application/vnd.docker.container.image.v1+json"
    layers = [{"digest": f"sha256:{'1' * 64}", "size": 4711}, {"digest": f"sha256:{'2' * 64}", "size": 89}]
    registry.put(NAME, "plain", {"config": {"mediaType": kind, "digest": digest, "size": 1}, "layers": layers})
    told = run("--resolve-image", "--uri", f"oci://{registry.host}/{NAME}:plain")
    assert (told["status"], told["bytes"], told["shape"], told["serve"]) == (0, 4800, {}, "")


def test_what_cannot_be_mounted_is_refused(run: Run, registry: Registry, model: Path, tmp_path: Path) -> None:
    registry.push(NAME, "files", {"config.json": b"{}"})
    there = f"oci://{registry.host}/{NAME}"
    found = run("--resolve-image", "--uri", f"{there}:files")
    assert (found["status"], found["reason"]) == (3, "BadRequest")
    assert "is an artifact of files and no image" in found["message"]
    assert run("--resolve-image", "--uri", f"{there}:none")["reason"] == "ModelNotFound"
    assert run("--resolve-image", "--uri", "hf://a/b")["reason"] == "BadRequest"
    registry.login = ("somebody", "else")
    assert run("--resolve-image", "--uri", f"{there}:files")["reason"] == "TokenRejected"
    # And an image is no artifact.
    registry.login = None
    written(run, model, tmp_path / "image", tmp_path / "models")
    push(registry, tmp_path / "image", "v1")
    found = run("--uri", f"{there}:v1", "--dest", str(tmp_path / "models"))
    assert found["reason"] == "BadRequest"
    assert "cache.mode: Image" in found["message"]


@pytest.mark.parametrize("label", ["{", "[]", '{"bytes": "many"}', '{"shape": 3}'])
def test_a_damaged_label_is_said(run: Run, registry: Registry, label: str) -> None:
    config = json.dumps({"config": {"Labels": {"dev.stoker.model": label}}}).encode()
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    registry.blobs[digest] = config
    kind = "application/vnd.oci.image.config.v1+json"
    registry.put(NAME, "odd", {"config": {"mediaType": kind, "digest": digest, "size": 1}, "layers": []})
    found = run("--resolve-image", "--uri", f"oci://{registry.host}/{NAME}:odd")
    assert found["reason"] in ("FetchFailed", "BadRequest")
    assert "dev.stoker.model" in found["message"]


def test_what_stands_there_is_not_overwritten(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    found = run("--uri", f"file://{model}", "--dest", str(tmp_path / "models"), "--image", str(tmp_path / "mine"))
    assert found["reason"] == "BadRequest"
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["precious"]


def test_bytes_that_changed_since_make_no_image(run: Run, model: Path, tmp_path: Path) -> None:
    report = written(run, model, tmp_path / "image", tmp_path / "models")
    before = manifest_of(tmp_path / "image")[0]
    weights = tmp_path / "models" / report["path"] / "model-00002-of-00002.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"\0" * stat.st_size)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found = run("--uri", f"file://{model}", "--dest", str(tmp_path / "models"), "--image", str(tmp_path / "image"))
    assert found["reason"] == "ChecksumMismatch"
    assert manifest_of(tmp_path / "image")[0] == before, "what was there stays"
