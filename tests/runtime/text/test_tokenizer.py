"""`Tokenizer` from files: ids and texts as in `transformers`, exact bytes per token, and errors that name files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests import real_models
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from stoker_runtime.errors import ModelError
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.text.detokenizer import Detokenizer
from stoker_runtime.text.tokenizer import Tokenizer, TokenizerFiles

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "naïve café 日本語 🙂🙃",
    "tabs\tand\nlines\r\n\n",
    "1234567890 x=y+z;",
    "",
]
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "hello hello world world"] * 5


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    return tokenizer


def sentencepiece() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(["hello world abc " * 3], trainers.BpeTrainer(vocab_size=300, special_tokens=special))
    # Only the first three are special: bytes are ordinary tokens in real vocabularies.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    return RustTokenizer.from_str(json.dumps(spec))


def metaspace() -> RustTokenizer:
    tokenizer = RustTokenizer(
        models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁hello", -3.0), ("w", -4.0), ("o", -4.5)], 0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}


def write(folder: Path, rust: RustTokenizer, **config: Any) -> Path:
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}, **config})
    )
    return folder


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_equals_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    rust = KINDS[kind]()
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rust.token_to_id("<s>"))]
    )
    ours = Tokenizer.load(str(write(tmp_path, rust)))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids
            expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_join_to_what_the_library_decodes(kind: str) -> None:
    rust = KINDS[kind]()
    ours = Tokenizer(rust, TokenizerFiles(), "test")
    for text in ["hello world", "hello w日🙂o", *TEXTS]:
        ids = rust.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special=False) == rust.decode(ids, skip_special_tokens=False)


def test_a_continuation_keeps_its_first_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(write(tmp_path, sentencepiece())))
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([at]) for at in ids) == " hello world"


def test_special_tokens_in_text(tmp_path: Path) -> None:
    rust = byte_level()
    rust.add_tokens([AddedToken("<think> now", special=False)])
    tokenizer = Tokenizer.load(str(write(tmp_path, rust)))
    ids = tokenizer.encode("a</s><think> now", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a<think> now"
    assert tokenizer.decode(ids, skip_special=False) == "a</s><think> now"
    assert tokenizer.token_to_id("</s>") in tokenizer.special_ids


def test_unknown_ids_have_no_text() -> None:
    tokenizer = Tokenizer.synthetic(300)
    assert [tokenizer.token_bytes(at) for at in (-1, 299, 300, 10**9)] == [b"", b" 299", b"", b""]
    assert tokenizer.id_to_token(-1) is None


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_id_of_a_shape_has_text(shape: str) -> None:
    tokenizer = Tokenizer.load(f"shape:{shape}")
    size = SHAPES[shape]["vocab_size"]
    assert all(tokenizer.token_bytes(at) for at in (0, 255, 256, size - 1, *random.choices(range(size), k=3000)))
    assert tokenizer.token_bytes(size) == b""
    assert tokenizer.encode("plain text") == list(b"plain text")


def test_files_beside_the_vocabulary(tmp_path: Path) -> None:
    folder = write(
        tmp_path, byte_level(), chat_template=[{"name": "default", "template": "D"}, {"name": "x", "template": "X"}]
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    assert tokenizer.eos_ids == (7, 1)
    assert tokenizer.chat_templates == {"default": "D", "x": "X"}
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(str(folder)).chat_templates["default"] == "F"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no tokenizer here"),
        ({"cl100k_base.tiktoken": "IQ== 0"}, "cl100k_base.tiktoken of tiktoken is not read: convert it"),
        ({"tokenizer.model": "\n"}, "tokenizer.model of SentencePiece is not read: .* --tokenizer a folder"),
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "cannot be read as a tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "holds a list"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "not valid JSON"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, files: dict[str, str | None], says: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(byte_level().to_str() if content is None else content)
    with pytest.raises(ModelError, match=says) as caught:
        Tokenizer.load(str(tmp_path))
    assert str(tmp_path) in caught.value.message


def test_an_unknown_decoder_is_refused() -> None:
    rust = RustTokenizer(models.BPE({"a": 0}, []))
    rust.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="the decoder is CTC"):
        Tokenizer(rust, TokenizerFiles(), "test")


def test_smollm2_equals_transformers() -> None:
    from transformers import AutoTokenizer

    file = real_models.smollm2()
    ours = Tokenizer.load(str(file))
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in [*TEXTS, "<|im_start|>user\nHi 12345<|im_end|>\n", "def f(x):\n    return x**2  # comment"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == text
    assert ours.eos_ids == (2,)
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    assert "im_start" in ours.chat_templates["default"]


def test_a_path_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer here: no such folder or \.gguf file\.$"):
        Tokenizer.load(str(tmp_path / "absent"))


def test_a_long_listing_is_cut(tmp_path: Path) -> None:
    for at in range(20):
        (tmp_path / f"file{at:02}").touch()
    with pytest.raises(ModelError, match="file07 and 12 more\\)"):
        Tokenizer.load(str(tmp_path))


def test_bytes_of_many_are_those_of_each_also_when_some_were_seen_before() -> None:
    tokenizer = Tokenizer.synthetic(700)
    generator = random.Random(23)
    for skip in (frozenset[int](), frozenset(generator.sample(range(700), 90))):
        for _ in range(20):
            ids = [generator.randrange(720) for _ in range(generator.randrange(60))]
            assert tokenizer.bytes_of(ids, skip) == b"".join(tokenizer.token_bytes(at) for at in ids if at not in skip)


def test_a_token_with_a_character_that_stands_for_no_byte_is_its_own_text() -> None:
    rust = RustTokenizer(models.BPE({"\u0120a": 0, "a b": 1, "\u00ad": 2, "\u0143": 3, "\u4e00": 4}, []))
    rust.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(rust, TokenizerFiles(), "here")
    given = [tokenizer.token_bytes(at) for at in range(5)]
    assert given == [b" a", b"a b", "\u00ad".encode(), b"\xad", "\u4e00".encode()]
