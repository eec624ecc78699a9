"""What a URI says: scheme, place, and, for a hub, an optional single file.

    hf://ORG/REPO                 every file the default choice takes
    hf://ORG/REPO/PATH/FILE.gguf  that file alone (with its other parts, when it is split)
    hf://ORG/REPO:Q4_K_M          the one GGUF model of that quantization
    modelscope://ORG/REPO         the same three forms, of ModelScope
    https://HOST/PATH/FILE        that file alone
    file:///PATH                  a folder or a file on this machine; FILE.tar is a bundle
    pvc://CLAIM/PATH              a folder or a file on the volume CLAIM, mounted under --mount-root
    s3://BUCKET/PREFIX            every object below the prefix that the default choice takes; so gs:// and, with a
                                  container in the bucket's place, az://
    s3://BUCKET/PREFIX/FILE.gguf  that object alone (with its other parts, when it is split)
    oci://REGISTRY/NAME:TAG       every file among the layers of an artifact that the default choice takes; so
                                  oci://REGISTRY/NAME@sha256:HEX

Invariants: a reference holds no secret; its `text` is what a status may show.
Does no I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from urllib.parse import unquote

from stoker_runtime.fetch.errors import BadRequest

STORES = ("s3", "gs", "az")
"""Object stores."""
MOVING = ("hf", "oci", *STORES)
"""Those that have revisions: a branch, a tag, the state of a prefix."""
SCHEMES = ("hf", "modelscope", *STORES, "oci", "https", "http", "file", "pvc")
PUBLISHED = (*(f"{scheme}://" for scheme in STORES), "oci://", "modelscope://", "https://")
"""How URIs begin that a server takes in the place of a path, beside the hub's."""
# The longest key that the three stores take is 1,024 bytes; names of buckets and containers differ little.
_BUCKET = re.compile(r"[a-z0-9$][a-z0-9._-]{1,221}[a-z0-9]")
_ARTIFACT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# The longest name of a file, or of a folder, that Linux' file systems take.
_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed URI. `place` is "org/repo", "bucket/prefix", a URL, or a path; `file` is the one file asked for, or "".

    `quantization` is that of the GGUF model asked for, or "".
    """

    scheme: str
    place: str
    file: str
    text: str
    quantization: str = ""

    @property
    def bundle(self) -> bool:
        """Whether it names a model in one file, as `stoker fetch --bundle` writes it."""
        return self.scheme in ("file", "pvc") and self.place.endswith(".tar")


def parse(text: str) -> Reference:
    """Parse a model URI, or raise BadRequest with what would be right."""
    scheme, separator, rest = text.partition("://")
    if not separator or not rest or any(c.isspace() for c in text):
        raise BadRequest(
            f"{text!r} is no model URI; write it as hf://ORG/REPO, s3://BUCKET/PREFIX, https://…, file:///PATH or "
            "pvc://CLAIM/PATH."
        )
    if scheme not in SCHEMES:
        raise BadRequest(f"The scheme {scheme!r} of {text!r} is not known; supported are {', '.join(SCHEMES)}.")
    if scheme in ("hf", "modelscope"):
        return replace(_hub(text, rest, scheme), scheme=scheme)
    if scheme in ("http", "https"):
        return _web(text, rest)
    if scheme == "pvc":
        return _claim(text, rest)
    if scheme in STORES:
        return _store(scheme, text, rest)
    if scheme == "oci":
        return _artifact(text, rest)
    if not rest.startswith("/"):
        raise BadRequest(f"{text!r} has no absolute path; a local folder is written with three slashes: file:///PATH.")
    return Reference("file", rest, "", text)


def relative_path(name: str, where: str) -> str:
    """Return `name` if it is a safe relative POSIX path, else raise: a listing must not write outside the
    destination. What is judged is the name as it will be written: decode before, never after.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name:
        raise BadRequest(f"{where} names the file {name!r}, which is no plain relative path.")
    if any(ord(c) < 32 or ord(c) == 127 or "\ud800" <= c <= "\udfff" for c in name):
        raise BadRequest(f"{where} names the file {name!r}, which holds control characters or no valid Unicode.")
    if max(map(len, (part.encode() for part in path.parts))) > _NAME_BYTES:
        raise BadRequest(f"{where} names the file {name[:80]!r}…, a name that no file system takes.")
    if path.parts[0].startswith(".stoker") or name == "stoker-manifest.json":
        raise BadRequest(f"{where} names the file {name!r}, a name that stoker keeps for itself.")
    return name


def _hub(text: str, rest: str, scheme: str = "hf") -> Reference:
    head, colon, quantization = rest.partition(":")
    parts = head.split("/")
    if "@" in rest:
        raise BadRequest(f"{text!r} holds an '@'; give the branch, tag or commit as --revision.")
    if len(parts) < 2 or not all(_NAME.fullmatch(part) for part in parts[:2]):
        raise BadRequest(f"{text!r} names no repository; write it as {scheme}://ORG/REPO or {scheme}://ORG/REPO/FILE.")
    file = "/".join(parts[2:])
    if colon and (file or not _NAME.fullmatch(quantization)):
        raise BadRequest(f"{text!r} names no GGUF model; write its quantization as {scheme}://ORG/REPO:Q4_K_M.")
    place = "/".join(parts[:2])
    return Reference("hf", place, relative_path(file, text) if file else "", text, quantization)


def hub_name(text: str) -> Reference | None:
    """A repository as people write it to an engine, ORG/REPO[/FILE.gguf|:Q4_K_M]; None for what can be none.

    A name that ends as a file does is a file's, unless it names the repository too.
    """
    if text.startswith("hf://"):
        return parse(text)
    parts = text.partition(":")[0].split("/")
    file = parts[-1].endswith((".gguf", ".safetensors", ".json"))
    if len(parts) < 2 or (len(parts) == 2 and file) or (len(parts) > 2 and not parts[-1].endswith(".gguf")):
        return None
    try:
        return replace(_hub(text, text), text=text)
    except BadRequest:
        return None


def _web(text: str, rest: str) -> Reference:
    host, _, path = rest.partition("/")
    if "@" in host:
        raise BadRequest(
            "A web address must not hold a user name or password; a token is given in HF_TOKEN, with --send-token."
        )
    shown = text.partition("?")[0].partition("#")[0]
    name = unquote(path.partition("?")[0].partition("#")[0].rpartition("/")[2])
    if not host or not name:
        raise BadRequest(f"{shown!r} names no file; a web address must end in a file's name.")
    if "/" in name:
        raise BadRequest(f"{shown!r} ends in the name {name!r}, which is no plain file name.")
    return Reference("https", text, relative_path(name, shown), shown)


def _store(scheme: str, text: str, rest: str) -> Reference:
    bucket, _, path = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        what = "container" if scheme == "az" else "bucket"
        raise BadRequest(f"{text!r} names no {what}; write it as {scheme}://{what.upper()}/PREFIX.")
    if "?" in path or "#" in path:
        raise BadRequest(f"{text.partition('?')[0]!r} is followed by a query; keys are given in the environment.")
    path = path.strip("/")
    folder, _, file = relative_path(path, text).rpartition("/") if path.endswith(".gguf") else (path, "", "")
    if folder:
        relative_path(folder, text)
    return Reference(scheme, f"{bucket}/{folder}".rstrip("/"), file, text.rstrip("/"))


def _artifact(text: str, rest: str) -> Reference:
    if not _ARTIFACT.fullmatch(rest):
        raise BadRequest(f"{text!r} names no artifact; write it as oci://REGISTRY/NAME:TAG or oci://…/NAME@sha256:HEX.")
    return Reference("oci", rest, "", text)


def _claim(text: str, rest: str) -> Reference:
    claim, _, path = rest.partition("/")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", claim):
        raise BadRequest(f"{text!r} names no PersistentVolumeClaim; write it as pvc://CLAIM/PATH.")
    path = path.strip("/")
    return Reference("pvc", f"{claim}/{relative_path(path, text)}" if path else claim, "", text)
