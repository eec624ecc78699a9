"""Tokenizers built from GGUF metadata: llama.cpp's own vectors, SentencePiece BPE by its definition, and refusals."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.text.llama_vocab import FOLDER
from tokenizers import Tokenizer, pre_tokenizers

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.errors import ModelError
from stoker_runtime.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    build,
)

NOWHERE = Path("test.gguf")
SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpp_vectors(name: str) -> None:
    file = FOLDER / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip("llama.cpp's vocabularies are not here: python tests/runtime/text/llama_vocab.py")
    tokenizer = build(read_gguf_header(file).metadata, file)
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = file.with_suffix(".gguf.out").read_text().split("\n")
    vectors = list(zip(texts, lines, strict=False))
    assert len(vectors) >= 46
    for text, line in vectors:
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(token) for token in line.split()], text


PIECES = ["a", "b", "c", "ab", "bc", "abc", "aa", "bb", f"{SPACE}a", SPACE, f"{SPACE}ab", "cab", "é", "日"]
SCORES = [-9.0, -8.0, -7.5, -1.0, -2.0, -3.0, -1.5, -4.0, -2.5, -6.0, -0.5, -3.5, -7.0, -7.2]


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary: specials, 256 bytes, pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tag>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES), USER_DEFINED]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + SCORES + [0.0],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def spm_by_definition(text: str) -> list[str]:
    """SentencePiece BPE: join the neighbours with the best score, the leftmost of equals, until none is left."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        joins = [
            (-scores[symbols[at] + symbols[at + 1]], at)
            for at in range(len(symbols) - 1)
            if symbols[at] + symbols[at + 1] in scores
        ]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces: list[str] = []
    for symbol in symbols:
        pieces += [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return build(spm_metadata(), NOWHERE)


@settings(max_examples=300)
@given(text=st.text(alphabet="abc é日🙂", max_size=20))
def test_sentencepiece_bpe_by_definition(spm: Tokenizer, text: str) -> None:
    assert spm.encode(text, add_special_tokens=False).tokens == spm_by_definition(text)


def test_specials_and_user_tokens(spm: Tokenizer) -> None:
    assert spm.encode("ab").tokens == ["<s>", f"{SPACE}ab"]
    assert spm.encode("ab<tag>c</s>", add_special_tokens=False).tokens == [
        f"{SPACE}ab",
        "<tag>",
        SPACE,
        "c",
        "</s>",
    ]
    assert spm.decode(spm.encode("ab 日🙂").ids) == "ab 日🙂"


def test_flags_of_the_file() -> None:
    plain = build(spm_metadata(**{"tokenizer.ggml.add_space_prefix": False}), NOWHERE)
    assert plain.encode("ab", add_special_tokens=False).tokens == ["ab"]
    ends = build(spm_metadata(**{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}), NOWHERE)
    assert ends.encode("ab").tokens == [f"{SPACE}ab", "</s>"]


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "Ġ", "ab", "Ġab", "<end>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.eos_token_id": 5,
        **changes,
    }


def test_byte_level_bpe() -> None:
    tokenizer = build(bpe_metadata(), NOWHERE)
    assert tokenizer.encode("ab ab<end>").ids == [3, 4, 5]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_compiles_and_loses_nothing(name: str) -> None:
    from stoker_runtime.text.tokenizer import BYTE_OF_CHARACTER

    tokens = list(BYTE_OF_CHARACTER)
    metadata = bpe_metadata(
        **{
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0,
        }
    )
    tokenizer = build(metadata, NOWHERE)
    text = "Hello, I'll buy 12345 日本語 🙂\r\n\n  tabs\tand\u00a0more!!! ελληνικά `x`<y>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_runs_of_spaces_are_split_into_powers_of_two() -> None:
    """Jais 2: the last space before a word goes with it, and of others as many as the largest power that fits."""
    split = pre_tokenizers.Sequence(PRE_TOKENIZERS["jais-2"]())
    for count in {random.randrange(4, 600) for _ in range(20)}:
        pieces = [piece for piece, _ in split.pre_tokenize_str("a" + " " * count + "b12345\n")]
        lengths = [len(piece) for piece in pieces[1 : pieces.index("Ġb")]]
        assert sum(lengths) == count - 1
        assert lengths == sorted(lengths, reverse=True)
        left = count - 1
        for length in lengths:
            assert length == 1 << (left.bit_length() - 1)
            left -= length
        assert pieces[pieces.index("Ġb") + 1 :] == ["123", "45", "Ċ"]


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (bpe_metadata(**{"tokenizer.ggml.model": "rwkv"}), "tokenizer.ggml.model is 'rwkv'"),
        (bpe_metadata(**{"tokenizer.ggml.pre": "lama-bpe"}), "did you mean 'llama-bpe'"),
        (bpe_metadata(**{"tokenizer.ggml.tokens": []}), "no tokenizer.ggml.tokens"),
        (bpe_metadata(**{"tokenizer.ggml.merges": 5}), "no tokenizer.ggml.merges"),
        (bpe_metadata(**{"tokenizer.ggml.merges": ["ab"]}), "the merge 'ab'"),
        (spm_metadata(**{"tokenizer.ggml.scores": [1.0]}), "one score for each of"),
    ],
)
def test_refusals(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build(metadata, NOWHERE)


def gguf_bytes(strings: list[str]) -> bytes:
    """A GGUF file with one list of strings."""

    def spelled(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + spelled("tokenizer.ggml.tokens")
    return head + struct.pack("<IIQ", 9, 8, len(strings)) + b"".join(map(spelled, strings))


def test_lists_of_strings_survive_any_buffer_and_every_truncation_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strings = ["", "a", "日本語", "x" * 40, "end"]
    whole = gguf_bytes(strings)
    file = tmp_path / "model.gguf"
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr("stoker_runtime.checkpoint.gguf_header.READ_BYTES", size)
        file.write_bytes(whole)
        assert read_gguf_header(file).metadata == {"tokenizer.ggml.tokens": strings}
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            with pytest.raises(ModelError):
                read_gguf_header(file)
