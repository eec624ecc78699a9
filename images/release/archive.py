"""What an image holds, read off the archive that `docker save` writes: its platform, and the packages in it.

Invariants: nothing is run and nothing is unpacked to a disk, so an image of another machine's kind is read as well; a
file that a later layer deletes is not in the image.
Knows nothing of registries.
"""

from __future__ import annotations

import email.parser
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_GONE, _EMPTIED = ".wh.", ".wh..wh..opq"
_DPKG = "var/lib/dpkg/status"
_METADATA = ".dist-info/METADATA"


@dataclass(frozen=True, order=True)
class Package:
    """`kind` is of a package URL: deb or pypi. `license` "" = it does not say."""

    kind: str
    name: str
    version: str
    license: str = ""

    @property
    def url(self) -> str:
        """Its package URL."""
        name = f"debian/{self.name}" if self.kind == "deb" else self.name.lower().replace("_", "-")
        return f"pkg:{self.kind}/{name}@{self.version}"


@dataclass(frozen=True)
class Contents:
    """`platform` as linux/amd64."""

    platform: str
    packages: tuple[Package, ...]


def read_archive(archive: Path) -> Contents:
    """What the one image of an archive holds. Raises ValueError for another archive."""
    with tarfile.open(archive) as tar:
        [manifest] = json.loads(_read(tar, "manifest.json"))
        config = json.loads(_read(tar, manifest["Config"]))
        files: dict[str, bytes] = {}
        for layer in manifest["Layers"]:
            stream = tar.extractfile(layer)
            if stream is None:
                raise ValueError(f"{archive} has no layer {layer}")
            _add_layer(files, stream)
    platform = "/".join(str(config[key]) for key in ("os", "architecture", "variant") if config.get(key))
    return Contents(
        platform, tuple(sorted({package for name, text in files.items() for package in _found(name, text)}))
    )


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    stream = tar.extractfile(name)
    if stream is None:
        raise ValueError(f"the archive has no {name}")
    return stream.read()


def _add_layer(files: dict[str, bytes], stream: IO[bytes]) -> None:
    """Lay a layer over the lists of packages found so far."""
    with tarfile.open(fileobj=stream, mode="r:*") as layer:
        new: dict[str, bytes] = {}
        for member in layer:
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            if name == _EMPTIED:
                _take_out(files, f"{folder}/")
            elif name.startswith(_GONE):
                gone = f"{folder}/{name.removeprefix(_GONE)}".lstrip("/")
                files.pop(gone, None)
                _take_out(files, f"{gone}/")
            elif member.isfile() and _is_list(member.name.removeprefix("./")):
                text = layer.extractfile(member)
                new[member.name.removeprefix("./")] = text.read() if text is not None else b""
        files.update(new)


def _take_out(files: dict[str, bytes], folder: str) -> None:
    for name in [name for name in files if name.startswith(folder)]:
        del files[name]


def _is_list(name: str) -> bool:
    return name == _DPKG or name.endswith(_METADATA)


def _found(name: str, text: bytes) -> Iterator[Package]:
    parser = email.parser.BytesHeaderParser()
    if name != _DPKG:
        head = parser.parsebytes(text)
        named = str(head["License-Expression"] or head["License"] or "").splitlines()
        yield Package("pypi", str(head["Name"]), str(head["Version"]), named[0] if named else "")
        return
    for part in text.split(b"\n\n"):
        head = parser.parsebytes(part)
        if str(head["Status"] or "").endswith(" installed"):
            yield Package("deb", str(head["Package"]), str(head["Version"]))
