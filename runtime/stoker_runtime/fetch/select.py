"""Which of a repository's files a model needs.

Default choice: safetensors with their index, JSON configuration, tokenizer and chat template files; never pickles
(.bin). Where a repository has no safetensors and exactly one GGUF model, that one. A second copy of the same weights
in another layout (`consolidated*.safetensors` beside `model*.safetensors`) is left out.

Invariants: the result is sorted and never empty; a choice that only a person can make is an error that lists
the files. Globs match the whole path, `*` crosses `/`. Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.fetch.errors import BadRequest, ModelNotFound

DEFAULT_ALLOW = (
    "*.safetensors",
    "*.json",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Other frameworks' exports of the same weights, in folders of their own.
EXPORTS = ("onnx/*", "openvino/*", "coreml/*", "original/*", "flax/*", "gguf/*")


def select(
    names: Sequence[str],
    *,
    file: str = "",
    quantization: str = "",
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
    where: str,
) -> list[str]:
    """Choose from `names`; `file` asks for one file by name, `quantization` for the GGUF model whose name holds it.

    `where` is the URI, for messages. Raises ModelNotFound when what is asked for is not there, BadRequest when nothing
    or too much is left.
    """
    if quantization:
        return _quantized(quantization, names, where)
    if file:
        if file not in names:
            near = [name for name in names if name.endswith(".gguf")] if file.endswith(".gguf") else []
            hint = f" It has: {_listed(near)}." if near else ""
            raise ModelNotFound(f"{where}: there is no file {file!r}.{hint}")
        return _parts(file, names)
    if allow:
        chosen = [name for name in names if _matches(name, allow)]
    else:
        chosen = _default(names, where)
    chosen = sorted(name for name in chosen if not _matches(name, ignore))
    if not chosen:
        raise BadRequest(
            f"{where}: no file is left of {len(names)} (allow {list(allow or DEFAULT_ALLOW)}, ignore {list(ignore)})."
        )
    return chosen


def _default(names: Sequence[str], where: str) -> list[str]:
    chosen = [name for name in names if _matches(name, DEFAULT_ALLOW) and not _matches(name, EXPORTS)]
    if any(name.endswith(".safetensors") for name in chosen):
        if any(fnmatchcase(name, "model*.safetensors") for name in chosen):
            chosen = [name for name in chosen if not fnmatchcase(name, "consolidated*.safetensors")]
        return chosen
    ggufs = _ggufs(names)
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if not ggufs and pickles:
        raise BadRequest(
            f"{where} has its weights as pickles alone ({_listed(pickles)}), which are not loaded, because they can "
            "run code. Look for a repository with safetensors, or convert them."
        )
    if not ggufs:
        return chosen
    one = _parts(ggufs[0], names)
    if len(one) != len(ggufs):
        hub = "://" not in where or where.startswith("hf://")
        either = f", or its quantization as {where}:Q4_K_M" if hub else ""
        how = "allow one of them" if where.startswith("oci://") else f"name one as {where}/FILE{either}"
        raise BadRequest(f"{where} has no safetensors and {len(ggufs)} GGUF files; {how}: {_listed(sorted(ggufs))}.")
    return one


def _ggufs(names: Sequence[str]) -> list[str]:
    """GGUF files that hold a language model: what turns images into tokens lies beside it under a name of its own."""
    return [name for name in names if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj")]


def _quantized(quantization: str, names: Sequence[str], where: str) -> list[str]:
    """The one GGUF model whose name, or folder, holds `quantization` as a word: Q4_K is not Q4_K_M."""
    ggufs = _ggufs(names)
    word = re.compile(rf"(?:^|[-./]){re.escape(quantization)}(?:$|[-./])", re.IGNORECASE)
    found = [name for name in ggufs if word.search(name.removesuffix(".gguf"))]
    if not found:
        hint = f" It has: {_listed(sorted(ggufs))}." if ggufs else " It has no GGUF files."
        raise ModelNotFound(f"{where}: there is no GGUF file of {quantization}.{hint}")
    one = _parts(found[0], names)
    if set(one) != set(found):
        raise BadRequest(f"{where} means {len(found)} files; name one as ORG/REPO/FILE: {_listed(sorted(found))}.")
    return one


def _parts(file: str, names: Sequence[str]) -> list[str]:
    """The file, or all parts of the split GGUF it belongs to."""
    parts = list(part_names(file)) or [file]
    missing = [part for part in parts if part not in names]
    if missing:
        raise ModelNotFound(f"The split model {file!r} lacks its part {missing[0]!r}.")
    return parts


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
