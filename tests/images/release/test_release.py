"""images/release: what images hold is read off their archives, and what is published is found by its digests again."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster.apiserver import end, free_ports, spawn
from e2e.cluster.binaries import find
from images.release.__main__ import main
from images.release.archive import Package, read_archive
from images.release.chart import CHART, pinned, version
from images.release.registry import ReleaseError

DPKG = "var/lib/dpkg/status"
Layer = Mapping[str, str]


def wheel(name: str, number: str, more: str = "") -> str:
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: {number}\n{more}\nText: of no field\n"


def save(archive: Path, architecture: str, layers: Sequence[Layer]) -> Path:
    """An archive as `docker save` writes one."""
    names = [f"{at}/layer.tar" for at, _ in enumerate(layers)]
    parts = dict(zip(names, map(packed, layers), strict=True))
    plain = [gzip.decompress(part) if part[:2] == b"\x1f\x8b" else part for part in parts.values()]
    digests = [f"sha256:{hashlib.sha256(part).hexdigest()}" for part in plain]
    rootfs = {"type": "layers", "diff_ids": digests}
    config = {"os": "linux", "architecture": architecture, "config": {}, "rootfs": rootfs}
    manifest = [{"Config": "config.json", "RepoTags": None, "Layers": names}]
    parts |= {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(archive, "w") as tar:
        for name, data in parts.items():
            add(tar, name, data)
    return archive


def packed(layer: Layer) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz" if len(layer) % 2 else "w") as tar:
        for name, text in layer.items():
            add(tar, name, text.encode())
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def test_what_layers_deleted_is_not_in_the_image(tmp_path: Path) -> None:
    there = "opt/x/lib/python3.12/site-packages"
    debian = "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n\n"
    debian += "Package: old\nStatus: deinstall ok config-files\n"
    layers = [
        {f"{there}/pip-25.dist-info/METADATA": wheel("pip", "25.0"), DPKG: debian.replace("2.36-9", "2.31-1")},
        {f"./{there}/.wh.pip-25.dist-info": "", DPKG: debian, f"{there}/a_b-1.dist-info/METADATA": wheel("a_b", "1")},
        {f"{there}/Kopf-1.45.dist-info/METADATA": wheel("Kopf", "1.45", "License-Expression: MIT\n"),
         "usr/gone/c-1.dist-info/METADATA": wheel("c", "1"), f"{there}/kopf/METADATA": "Name: none"},
        {"usr/gone/.wh..wh..opq": ""},
    ]  # fmt: skip
    found = read_archive(save(tmp_path / "a.tar", "arm64", layers))
    assert found.platform == "linux/arm64"
    assert found.packages == (
        Package("deb", "libc6", "2.36-9"), Package("pypi", "Kopf", "1.45", "MIT"), Package("pypi", "a_b", "1"),
    )  # fmt: skip
    assert [package.url for package in found.packages] == [
        "pkg:deb/debian/libc6@2.36-9",
        "pkg:pypi/kopf@1.45",
        "pkg:pypi/a-b@1",
    ]


def test_values_that_have_lost_a_line_are_refused() -> None:
    values = (CHART / "values.yaml").read_text()
    assert 'digest: ""' in values
    with pytest.raises(ReleaseError, match="digest"):
        pinned(values.replace("  digest:", "  sum:"), "r.example", "sha256:1", "sha256:2")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A real one on this machine."""
    crane, (port,) = find("crane"), free_ports(1)
    if crane is None or find("helm") is None:
        pytest.skip("crane and helm are not built: python e2e/cluster/rig.py build crane helm")
    process = spawn([str(crane), "registry", "serve", f"--address=127.0.0.1:{port}"], tmp_path / "registry.log")
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        yield f"localhost:{port}"
    finally:
        end(process)


def fetched(registry: str, path: str) -> Any:
    request = urllib.request.Request(f"http://{registry}/v2/acme/{path}", headers={"Accept": "*/*"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_release_is_found_by_its_digests(tmp_path: Path, registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in (("operator-a", "amd64"), ("operator-b", "arm64"), ("runtime", "amd64")):
        save(tmp_path / f"{name}.tar", kind, [{f"x/p-{kind}.dist-info/METADATA": wheel(f"{name}-part", "7")}])
    flags = [f"--registry={registry}/acme", "--plain-http", f"--archives={tmp_path}"]
    assert main(flags) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert said.startswith(f"helm install stoker oci://{registry}/acme/charts/stoker --version {version()} ")

    index = fetched(registry, f"operator/manifests/{version()}")
    singles = {each["platform"]["architecture"]: each["digest"] for each in index["manifests"]}
    assert set(singles) == {"amd64", "arm64"}
    about = fetched(registry, f"operator/manifests/{singles['arm64'].replace(':', '-')}.sbom")
    assert about["subject"]["digest"] == singles["arm64"]
    parts = fetched(registry, f"operator/blobs/{about['layers'][0]['digest']}")
    assert [part["purl"] for part in parts["components"]] == ["pkg:pypi/operator-b-part@7"]
    assert parts["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": singles["arm64"][7:]}]

    chart = [str(find("helm")), "template", "s", f"oci://{registry}/acme/charts/stoker", "--plain-http"]
    done = subprocess.run(chart, capture_output=True, text=True, timeout=120)
    images = {word.strip('"') for word in done.stdout.split() if f"{registry}/acme" in word and "@" in word}
    names = {image.rpartition("=")[2].partition("@")[::2] for image in images}
    assert {name for name, _ in names} == {f"{registry}/acme/operator", f"{registry}/acme/runtime"}, done.stderr
    for name, digest in names:
        # What a node pulls is what was pushed: of the operator the index, so that each pulls its own.
        there = fetched(registry, f"{name.rpartition('/')[2]}/manifests/{digest}")
        assert ("manifests" in there) == name.endswith("operator") or len(there["manifests"]) == 1


def test_two_images_of_one_platform_are_refused(
    tmp_path: Path, registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("operator-a", "operator-b", "runtime"):
        save(tmp_path / f"{name}.tar", "amd64", [{"x": name}])
    assert main([f"--registry={registry}/acme", "--plain-http", f"--archives={tmp_path}"]) == 1
    assert "a second image of operator for linux/amd64" in capsys.readouterr().err
    with pytest.raises(urllib.error.HTTPError):
        fetched(registry, f"operator/manifests/{version()}")
