"""Text to token ids and back, from tokenizer.json, from a GGUF file, or synthetic for a model without text.

Invariants: `token_bytes` is exact: joining the bytes of ids and decoding them as UTF-8 is what `decode` returns (less
the one space that SentencePiece puts before a text), so streamed and whole answers agree; it is memoised, so its
cost per token is one list access. An id beyond the
vocabulary has no text. Encoding runs in Rust and releases the GIL, so that in a thread it holds nobody up.
Knows nothing of chat templates beyond finding their source, and nothing of HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.errors import ModelError
from stoker_runtime.models.config_source import SHAPE_PREFIX, shape_config
from stoker_runtime.text import gguf_tokenizer

SPACE: Final = gguf_tokenizer.SPACE
PIECE_CHARACTERS = 1 << 17
LISTED = 8  # names of a folder that an error quotes
BYTE_LEVEL, SENTENCEPIECE, WORDPIECE = "ByteLevel", "SentencePiece", "WordPiece"


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes, the inverse of what a byte-level pre-tokenizer applies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return characters | {chr(256 + shift): byte for shift, byte in enumerate(others)}


BYTE_OF_CHARACTER: Final = _byte_of_character()
_NO_BYTE: Final = 0x100
_BYTE_CHARACTERS: Final = dict.fromkeys(range(0x100), _NO_BYTE) | {
    ord(character): byte for character, byte in BYTE_OF_CHARACTER.items()
}
"""For `str.translate`: the character of each byte's own number, one beyond them for characters that stand for none."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What stands beside the vocabulary: names of special tokens, ids that end a text, template sources by name."""

    special: dict[str, str] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    templates: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a text, or of a pair of texts whose second begins at `second` (0: the tokenizer does not tell)."""

    ids: Sequence[int]
    second: int = 0


class Tokenizer:
    """A vocabulary and its merges, plus what its files say of special tokens and chat templates."""

    def __init__(self, rust: RustTokenizer, files: TokenizerFiles, source: str) -> None:
        """`source` is the file or folder for messages. Raises ModelError when the decoder's kind is unknown."""
        self._rust = rust
        self._plain: RustTokenizer | None = None
        self.source = source
        self.special_tokens = files.special
        self.chat_templates = files.templates
        self.eos_ids = files.eos_ids
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)
        added = rust.get_added_tokens_decoder()
        self.special_ids = frozenset(at for at, token in added.items() if token.special)
        self._added = {at: token.content for at, token in added.items()}
        parts = _decoder_parts(json.loads(rust.decoder.__getstate__()) if rust.decoder is not None else None)
        self._kind = _decoder_kind(parts, source)
        self._strips = any(map(_strips_first_space, parts))
        top = max([self.vocab_size - 1, *added]) + 1
        self._bytes: list[bytes | None] = [None] * top
        self._tables: dict[frozenset[int], list[bytes | None]] = {frozenset(): self._bytes}

    @classmethod
    def load(cls, path: str) -> Tokenizer:
        """Load from a folder with tokenizer.json, from a tokenizer.json, from a .gguf file, or `shape:NAME`.

        Raises ModelError naming the file that is missing or cannot be used.
        """
        if path.startswith(SHAPE_PREFIX):
            return cls.synthetic(_vocabulary_of(path))
        place = Path(path)
        if place.suffix == ".gguf":
            return _from_gguf(place)
        folder, file = (place, place / "tokenizer.json") if place.is_dir() else (place.parent, place)
        if not file.is_file():
            if not place.exists():
                raise ModelError(f"{path}: no tokenizer here: no such folder or .gguf file.")
            if (other := _other_kind(folder)) is not None:
                raise ModelError(
                    f"{file}: not here, and {other} is not read: convert it to a tokenizer.json, or name with "
                    "--tokenizer a folder that has one."
                )
            raise ModelError(f"{file}: no tokenizer here ({_listing(folder)}); give one with --tokenizer.")
        try:
            rust = RustTokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise ModelError(f"{file}: cannot be read as a tokenizer: {error}.") from error
        # What a training script left here: a text is neither cut nor filled up unless a request says so.
        rust.no_truncation()
        rust.no_padding()
        return cls(rust, _folder_files(folder, rust), str(file))

    @classmethod
    def synthetic(cls, vocab_size: int = 256) -> Tokenizer:
        """A tokenizer for a model without one: ids below 256 are bytes, the others read as words of their number."""
        vocabulary = dict(BYTE_OF_CHARACTER)
        vocabulary |= {f"\u0120{at}": at for at in range(256, vocab_size)}
        rust = RustTokenizer(models.BPE(vocabulary, []))
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.decoder = decoders.ByteLevel()
        return cls(rust, TokenizerFiles(), "synthetic")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in it are matched as such."""
        return self.encode_many((text,), add_special_tokens)[0]

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each of `texts`, as `encode` gives them."""
        return _ids(self._rust, texts, add_special_tokens)

    def encode_texts(
        self, text: str, second: str | None, add_special_tokens: bool = True, limit: int | None = None
    ) -> Encoded:
        """The ids of a text, or of a pair as the tokenizer joins them, at most `limit` of them.

        What is too long loses the end of its last text; the special tokens around it stay.
        """
        given = text if second is None else (text, second)
        found = self._rust.encode_batch_fast([given], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = found.ids
        kinds: list[int] = found.type_ids
        excess = len(ids) - limit if limit is not None else 0
        if excess > 0:
            # Read once: the library makes a new list each time.
            parts: list[int | None] = found.sequence_ids
            order = sorted(range(len(ids)), key=lambda at: (parts[at] or 0, at))
            texts = [at for at in order if parts[at] is not None]
            dropped = set(texts[-excess:])
            kept = [at for at in range(len(ids)) if at not in dropped][:limit]
            ids, kinds = [ids[at] for at in kept], [kinds[at] for at in kept]
        return Encoded(ids, kinds.index(1) if 1 in kinds else 0)

    def encode_plain(self, text: str) -> list[int]:
        """The ids of `text` as nothing but text: a special token written out in it is cut into pieces."""
        return self.encode_many_plain((text,))[0]

    def encode_many_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each of `texts`, as `encode_plain` gives them."""
        if self._plain is None:
            # A copy, because the switch belongs to the tokenizer and not to the call.
            self._plain = RustTokenizer.from_str(self._rust.to_str())
            self._plain.encode_special_tokens = True
        return _ids(self._plain, texts, add_special_tokens=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        skip = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(at) for at in ids if at not in skip).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to a text; empty for an id that stands for nothing."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def bytes_of(self, ids: Sequence[int], skip: frozenset[int] = frozenset()) -> bytes:
        """The bytes of `ids`, none of them negative, joined; those of `skip` add nothing."""
        table = self._tables.get(skip)
        if table is None:
            table = self._tables[skip] = [b"" if at in skip else None for at in range(len(self._bytes))]
        try:
            return b"".join(map(table.__getitem__, ids))  # type: ignore[arg-type]
        except (TypeError, IndexError):  # one that was not seen before, or that is beyond the vocabulary
            for at in ids:
                if at < len(table) and table[at] is None:
                    table[at] = self.token_bytes(at)
        return b"".join([self.token_bytes(at) for at in ids if at not in skip])

    def spell(self, token_id: int) -> str:
        """The text of one id by itself; bytes that are no UTF-8 become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id."""
        token: str | None = self._rust.id_to_token(token_id) if token_id >= 0 else None
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        found: int | None = self._rust.token_to_id(token)
        return found

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == BYTE_LEVEL:
            try:
                return token.translate(_BYTE_CHARACTERS).encode("latin-1")
            except UnicodeEncodeError:  # a character that stands for no byte
                return token.encode()
        if self._kind == WORDPIECE:
            return token.removeprefix("##").encode() if token.startswith("##") else f" {token}".encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE, " ").encode()


def _ids(rust: RustTokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    # Of a single text `encode` keeps the GIL until it is done, which for a long one stops every stream of the process;
    # and what many texts became is freed piece by piece, because that keeps it too.
    found: list[list[int]] = []
    for some in _pieces(texts):
        found += [each.ids for each in rust.encode_batch_fast(some, add_special_tokens=add_special_tokens)]
    return found


def _pieces(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, so many at a time that they have PIECE_CHARACTERS, or one that has more."""
    some: list[str] = []
    size = 0
    for text in texts:
        if some and size + len(text) > PIECE_CHARACTERS:
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def _decoder_kind(parts: list[dict[str, Any]], source: str) -> str:
    """How tokens turn into bytes, read off the tokenizer's own decoder."""
    names = [str(part.get("type")) for part in parts]
    if "ByteLevel" in names:
        return BYTE_LEVEL
    if "Metaspace" in names or "ByteFallback" in names:
        return SENTENCEPIECE
    if "WordPiece" in names:
        return WORDPIECE
    raise ModelError(
        f"{source}: the decoder is {' + '.join(names) or 'missing'}; "
        "this runtime knows ByteLevel, Metaspace, ByteFallback and WordPiece."
    )


def _decoder_parts(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") == "Sequence":
        return [part for inner in spec["decoders"] for part in _decoder_parts(inner)]
    return [spec]


def _strips_first_space(part: dict[str, Any]) -> bool:
    """Whether this decoder drops the space that the encoder put before the first word."""
    kind = part.get("type")
    if kind == "Metaspace":
        return bool(part.get("prepend_scheme", "always") != "never")
    return kind == "WordPiece" or bool(kind == "Strip" and part.get("content") == " " and part.get("start", 0) > 0)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not an object.")
    return value


def _folder_files(folder: Path, rust: RustTokenizer) -> TokenizerFiles:
    config = _read_json(folder / "tokenizer_config.json")
    special = _read_json(folder / "special_tokens_map.json") | config
    names = {
        key: content
        for key, value in special.items()
        if key.endswith("_token") and (content := value.get("content") if isinstance(value, dict) else value)
        if isinstance(content, str)
    }
    ids = _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    ids += _as_ids(_read_json(folder / "config.json").get("eos_token_id"))
    named = rust.token_to_id(names["eos_token"]) if "eos_token" in names else None
    ids += [] if named is None else [named]
    return TokenizerFiles(names, tuple(dict.fromkeys(ids)), _folder_templates(folder, config))


def _as_ids(value: object) -> list[int]:
    many = value if isinstance(value, list) else [value]
    return [at for at in many if isinstance(at, int)]


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template sources by name; files of their own win over tokenizer_config.json."""
    source = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(source, str):
        named["default"] = source
    elif isinstance(source, list):
        named |= {str(entry["name"]): str(entry["template"]) for entry in source}
    stored = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, str):
        named["default"] = stored
    files = [("default", folder / "chat_template.jinja")]
    if (folder / "additional_chat_templates").is_dir():
        files += [(p.stem, p) for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    return named | {name: path.read_text(encoding="utf-8") for name, path in files if path.is_file()}


GGUF_END_KEYS = ("eos", "eot", "eom")
GGUF_SPECIAL_KEYS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
TEMPLATE_KEY = "tokenizer.chat_template"


def _other_kind(folder: Path) -> str | None:
    """A tokenizer of another kind in a folder, with its kind."""
    kinds = {"*.tiktoken": "tiktoken", "tokenizer.model": "SentencePiece", "tekken.json": "Mistral's tekken"}
    found = ((next(iter(sorted(folder.glob(pattern))), None), kind) for pattern, kind in kinds.items())
    return next((f"{file.name} of {kind}" for file, kind in found if file is not None), None)


def _listing(folder: Path) -> str:
    """What a folder holds, in a few words."""
    names = sorted(entry.name for entry in folder.iterdir())
    more = len(names) - LISTED
    return (", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")) or "the folder is empty"


def _vocabulary_of(shape: str) -> int:
    """Ids of a shape's model, each of which has text; the bytes alone for a shape that is not known."""
    try:
        known = shape_config(shape)
    except ModelError:
        return 256
    return max(256, int(known.get("vocab_size", 256)))


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    rust = gguf_tokenizer.build(metadata, path)
    identity = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in (*GGUF_SPECIAL_KEYS, *GGUF_END_KEYS)}
    names = {
        name: token
        for key, name in GGUF_SPECIAL_KEYS.items()
        if isinstance(at := identity[key], int) and (token := rust.id_to_token(at)) is not None
    }
    ends = [at for key in GGUF_END_KEYS if isinstance(at := identity[key], int)]
    templates = {
        key.removeprefix(TEMPLATE_KEY).removeprefix(".") or "default": source
        for key, source in metadata.items()
        if key.startswith(TEMPLATE_KEY) and isinstance(source, str)
    }
    return Tokenizer(rust, TokenizerFiles(names, tuple(dict.fromkeys(ends)), templates), str(path))
