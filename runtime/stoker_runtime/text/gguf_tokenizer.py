"""Build a `tokenizers.Tokenizer` from the metadata of a GGUF file: byte-level BPE and SentencePiece BPE; those of
encoders by `gguf_encoder_tokenizer.py`.

Invariants: ids are those of the file; control tokens are special, user-defined ones are matched before anything
else; a tokenizer model or pre-tokenizer that is not in the tables here is a ModelError that names it and the
known ones, because a wrong split gives wrong ids without a sound.
Knows nothing of files or templates. The split patterns are the ones the model makers publish in tokenizer.json.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from stoker_runtime.errors import ModelError
from stoker_runtime.text.gguf_encoder_tokenizer import (
    ROBERTA,
    build_unigram,
    build_word_piece,
    is_surrounded,
    surround,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
# Runs of spaces are tokens of powers of two.
_RUNS = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = _LLAMA3.replace(r"\s+(?!\S)|\s+", rf"{_RUNS}|\s{{1,2}}(?!\S)|\s")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters of Unicode, as DeepSeek's first tokenizer lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _bytes(use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [_bytes(use_regex=True)]


def _single_digits() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)]


def _patterns(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [*(_split(pattern) for pattern in patterns), _bytes()]


def _falcon() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        _bytes(use_regex=True),
        pre_tokenizers.Digits(individual_digits=False),
        _split("[0-9][0-9][0-9]"),
    ]


def _deepseek_llm() -> list[pre_tokenizers.PreTokenizer]:
    return [
        *(_split(p) for p in (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+")),
        _split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
        *(_split(p) for p in (r"\s+$", _DEEPSEEK_CJK)),
        pre_tokenizers.Digits(individual_digits=False),
        _bytes(),
    ]


def _deepseek_coder() -> list[pre_tokenizers.PreTokenizer]:
    return [
        *(_split(p) for p in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)),
        pre_tokenizers.Digits(individual_digits=True),
        _bytes(),
    ]


PRE_TOKENIZERS: dict[str, Callable[[], list[pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "mpt": _gpt2,
    "olmo": _gpt2,
    "phi-2": _gpt2,
    "jais": _gpt2,
    "exaone4": _gpt2,
    "modern-bert": _gpt2,
    ROBERTA: _gpt2,
    "default": _falcon,
    "falcon": _falcon,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "codeshell": _single_digits,
    "exaone": _single_digits,
    "llama-bpe": lambda: _patterns(_LLAMA3),
    "llama3": lambda: _patterns(_LLAMA3),
    "llama-v3": lambda: _patterns(_LLAMA3),
    "falcon3": lambda: _patterns(_LLAMA3),
    "pixtral": lambda: _patterns(_LLAMA3),
    "lfm2": lambda: _patterns(_LLAMA3),
    "dbrx": lambda: _patterns(_LLAMA3),
    "smaug-bpe": lambda: _patterns(_LLAMA3),
    "glm4": lambda: _patterns(_LLAMA3),
    "chatglm-bpe": lambda: _patterns(_LLAMA3),
    "jais-2": lambda: _patterns(_JAIS2),
    "qwen2": lambda: _patterns(_QWEN2),
    "deepseek-r1-qwen": lambda: _patterns(_QWEN2),
    "stablelm2": lambda: _patterns(_QWEN2),
    "megrez": lambda: _patterns(_QWEN2),
    "hunyuan": lambda: _patterns(_QWEN2),
    "qwen35": lambda: _patterns(_QWEN35),
    "tekken": lambda: _patterns(_TEKKEN),
    "gpt-4o": lambda: _patterns(_GPT4O),
    "llama4": lambda: _patterns(_GPT4O),
    "deepseek-llm": _deepseek_llm,
    "deepseek-coder": _deepseek_coder,
    "deepseek-v3": lambda: _patterns(r"\p{N}{1,3}", _CJK, _DEEPSEEK3),
}

# Whole pre-tokens that stand in the vocabulary are taken as they are, without running the merges.
IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "glm4", "tekken"})
BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"})


# Those that compose letters and accents before they split.
COMPOSED = frozenset({"modern-bert"})


def build(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer that the `tokenizer.ggml.*` keys of `metadata` describe; `path` is for messages."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{path}: no tokenizer.ggml.tokens; the GGUF file carries no tokenizer.")
    builders = {
        "gpt2": _build_bpe, "llama": _build_spm, "gemma4": _build_spm, "bert": _build_words, "t5": build_unigram
    }  # fmt: skip
    if not isinstance(model, str) or model not in builders:
        known = ", ".join(sorted(builders))
        raise ModelError(f"{path}: tokenizer.ggml.model is {model!r}; this runtime knows {known}.")
    tokenizer = builders[model](metadata, tokens, path)
    _add_special_tokens(tokenizer, metadata, tokens)
    if is_surrounded(metadata):
        surround(tokenizer, metadata, tokens, path)
    else:
        _add_post_processor(tokenizer, metadata, tokens)
    return tokenizer


def _build_bpe(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if name not in PRE_TOKENIZERS:
        near = difflib.get_close_matches(name, PRE_TOKENIZERS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ModelError(
            f"{path}: tokenizer.ggml.pre is {name!r}{hint}; this runtime knows {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    tokenizer = Tokenizer(models.BPE(_vocabulary(tokens), _merges(metadata, path), ignore_merges=name in IGNORE_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[name]())
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_spm(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    """SentencePiece BPE: with explicit merges where the file has them, else with merges ordered by score."""
    vocabulary = _vocabulary(tokens)
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, path)
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ModelError(f"{path}: tokenizer.ggml.scores must give one score for each of {len(tokens)} tokens.")
        merges = merges_by_score(tokens, scores, token_types(metadata, len(tokens)))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.merges" not in metadata)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _build_words(metadata: Mapping[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    return build_word_piece(metadata, tokens, token_types(metadata, len(tokens)))


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score first.

    SentencePiece BPE joins, at each step, the neighbours whose join has the highest score. A merge list in that
    order makes the ranked BPE choose the same joins; pairs that give the same token are ordered by their parts.
    Only normal tokens take part: control, byte and user-defined tokens never arise from a join.
    """
    ids = {token: at for at, token in enumerate(tokens) if types[at] in (NORMAL, UNUSED)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, at in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            left_id = ids.get(left)
            if left_id is not None:
                right_id = ids.get(right)
                if right_id is not None:
                    found.append((-scores[at], at, left_id, right_id, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def token_types(metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    """The type of each token; all are normal where the file says nothing."""
    types = metadata.get("tokenizer.ggml.token_type")
    return types if isinstance(types, list) and len(types) == count else [NORMAL] * count


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: at for at, token in enumerate(tokens)}


def _merges(metadata: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{path}: no tokenizer.ggml.merges; the BPE tokenizer of this GGUF file is incomplete.")
    # A merge is "left right"; either side may itself start with a space, so the split looks past the first character.
    found: list[tuple[str, str]] = []
    for merge in merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelError(f"{path}: the merge {merge!r} names no two tokens.")
        found.append((merge[:cut], merge[cut + 1 :]))
    return found


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    types = token_types(metadata, len(tokens))
    wanted = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in wanted if token.special])
    tokenizer.add_tokens([token for token in wanted if not token.special])


def _add_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    spm = metadata.get("tokenizer.ggml.model") != "gpt2"
    bos_default = spm or metadata.get("tokenizer.ggml.pre") in BOS_BY_DEFAULT
    template = ["$A"]
    special: list[tuple[str, int]] = []
    for key, default, front in (("bos", bos_default, True), ("eos", False, False)):
        identity = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{key}_token", default) and isinstance(identity, int):
            special.append((tokens[identity], identity))
            template.insert(0 if front else len(template), tokens[identity])
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
