"""The tokenizers of encoders from a GGUF file: WordPiece (BERT), Unigram (XLM-RoBERTa), and what stands around texts.

Invariants: ids are those of the file. Whether letters are lowered and lose their accents no key says: a vocabulary that
was made so has no upper-case letter, or none with an accent, and cannot spell any.
Knows nothing of files, nor of byte-level tokenizers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from stoker_runtime.errors import ModelError

BEGIN, CONTINUED = "\u2581", "##"
"""What begins a word in the file, and what begins the rest of one for the tokenizer."""
CONTROL = 3
KEY = "tokenizer.ggml"
# The first and the last token of a text, by the keys that may name them and by what they are called.
FIRST = (("cls", "bos"), ("[CLS]", "<s>"))
LAST = (("seperator", "eos"), ("[SEP]", "</s>"))
# Byte-level tokenizers of encoders whose files need not say that a text is surrounded.
ROBERTA = "roberta-bpe"


def build_word_piece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """WordPiece: words begin with a mark in the file, and the rest of one has none."""
    vocabulary: dict[str, int] = {}
    words: list[str] = []
    for at, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != CONTROL:
            token = token[1:] if token.startswith(BEGIN) else f"{CONTINUED}{token}"
            words.append(token)
        vocabulary.setdefault(token, at)
    unknown = metadata.get(f"{KEY}.unknown_token_id")
    name = tokens[unknown] if isinstance(unknown, int) else "[UNK]"
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=name, continuing_subword_prefix=CONTINUED))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=not _has_accents(words),
        lowercase=not _has_upper_case(words),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUED)
    return tokenizer


def _has_upper_case(words: Iterable[str]) -> bool:
    """Of words alone: what a vocabulary holds in brackets is never read from a text."""
    return any("A" <= letter <= "Z" for word in words if "[" not in word for letter in word)


def _has_accents(words: Iterable[str]) -> bool:
    """Whether a letter of Latin script has one."""
    letters = {letter for word in words for letter in word if "\u00c0" <= letter <= "\u024f"}
    return any(unicodedata.combining(part) for letter in letters for part in unicodedata.normalize("NFD", letter))


def build_unigram(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    """SentencePiece's Unigram. Raises ModelError for a token without a score."""
    scores = metadata.get(f"{KEY}.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{path}: {KEY}.scores must give one score for each of {len(tokens)} tokens.")
    pieces = list(zip(tokens, (float(score) for score in scores), strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=metadata.get(f"{KEY}.unknown_token_id")))
    charsmap = metadata.get(f"{KEY}.precompiled_charsmap")
    if charsmap:
        tokenizer.normalizer = normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap))
    scheme = "always" if metadata.get(f"{KEY}.add_space_prefix", True) else "never"
    marks = pre_tokenizers.Metaspace(replacement=BEGIN, prepend_scheme=scheme)
    # Without them each run of spaces is one, and none stands at an end.
    steps = [pre_tokenizers.WhitespaceSplit()] if metadata.get(f"{KEY}.remove_extra_whitespaces", True) else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, marks])
    tokenizer.decoder = decoders.Metaspace(replacement=BEGIN, prepend_scheme=scheme)
    return tokenizer


def is_surrounded(metadata: Mapping[str, Any]) -> bool:
    """Whether texts stand between two tokens, and pairs have a third one between them."""
    told = metadata.get(f"{KEY}.add_sep_token") or metadata.get(f"{KEY}.pre") == ROBERTA
    return bool(told) or metadata.get(f"{KEY}.model") in ("bert", "t5")


def surround(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> None:
    """Put texts and pairs between the file's tokens: a pair's texts are of two kinds, but RoBERTa's, between which its
    last token stands twice. Raises ModelError for a token that the file lacks.
    """
    first, last = (_named(metadata, tokens, *each, path) for each in (FIRST, LAST))
    front = [tokens[first]] if metadata.get(f"{KEY}.add_bos_token", True) else []
    end = tokens[last]
    roberta = metadata.get(f"{KEY}.model") == "t5" or metadata.get(f"{KEY}.pre") == ROBERTA
    second = [end, "$B", end] if roberta else ["$B:1", f"{end}:1"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*front, "$A", end],
        pair=[*front, "$A", end, *second],
        special_tokens=[(tokens[at], at) for at in {first, last}],
    )


def _named(
    metadata: Mapping[str, Any], tokens: Sequence[str], keys: Iterable[str], names: Iterable[str], path: Path
) -> int:
    stated = (metadata.get(f"{KEY}.{key}_token_id") for key in keys)
    found = next((at for at in stated if isinstance(at, int)), None)
    if found is None:
        found = next((tokens.index(name) for name in names if name in tokens), None)
    if found is None:
        raise ModelError(f"{path}: no {KEY}.{next(iter(keys))}_token_id, which begins or ends an encoder's text.")
    return found
