"""e2e/cluster/image_tar.py: an archive that container engines import, the same each time."""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path

from e2e.cluster.image_tar import write_image, write_root


def test_the_archive_names_its_layer_by_content(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF")
    archives = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for archive in archives:
        write_image(archive, "local/program:1", {"Entrypoint": ["/program"]}, {"program": program})
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        content = {name: stream.read() for name, stream in files.items() if stream}
    [manifest] = json.loads(content["manifest.json"])
    assert manifest["RepoTags"] == ["local/program:1"]
    config = json.loads(content[manifest["Config"]])
    assert config["config"]["Entrypoint"] == ["/program"]
    digest = hashlib.sha256(content[manifest["Layers"][0]]).hexdigest()
    assert config["rootfs"]["diff_ids"] == [f"sha256:{digest}"]


def test_a_root_is_the_image_of_a_processor(tmp_path: Path) -> None:
    root, archive = tmp_path / "root.tar", tmp_path / "image.tar"
    root.write_bytes(b"as it is")
    write_root(archive, "local/base:1", {"Env": ["A=b"]}, root, "arm64")
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        content = {name: stream.read() for name, stream in files.items() if stream}
    [manifest] = json.loads(content["manifest.json"])
    config = json.loads(content[manifest["Config"]])
    assert (config["architecture"], config["config"]["Env"]) == ("arm64", ["A=b"])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(b'as it is').hexdigest()}"]
    assert [content[layer] for layer in manifest["Layers"]] == [b"as it is"]
