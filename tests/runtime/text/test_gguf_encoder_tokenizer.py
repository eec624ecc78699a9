"""Encoders' tokenizers from GGUF metadata: the ids of transformers' own on random text, alone and in pairs."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import real_models
from tests.runtime.models.test_zoo import SEED
from tests.runtime.text.llama_vocab import FOLDER
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, trainers

from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.errors import ModelError
from stoker_runtime.text.gguf_tokenizer import build
from stoker_runtime.text.tokenizer import Tokenizer as OwnTokenizer
from stoker_runtime.text.tokenizer import TokenizerFiles

NOWHERE = Path("test.gguf")
NORMAL, UNKNOWN, CONTROL = 1, 2, 3
LETTERS = "aabcdeeiostÄéÖñßABZeu\u0301日本語абвñ123"
OTHERS = " .,!?'-_#[]()\t\n\u00a0\u2581🙂\x07"
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS if rng.random() < 0.8 else OTHERS) for _ in range(rng.randrange(60)))


def word_pieces(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """A WordPiece vocabulary as converters write it: a mark before each word, nothing before the rest of one."""
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])

    def written(token: str) -> str:
        if token in BERT_SPECIAL:
            return token
        return token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"

    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": [written(token) for token in tokens],
        "tokenizer.ggml.token_type": [CONTROL if token in BERT_SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.unknown_token_id": vocabulary["[UNK]"],
        "tokenizer.ggml.seperator_token_id": vocabulary["[SEP]"],
        "tokenizer.ggml.cls_token_id": vocabulary["[CLS]"],
    }


def assert_same(metadata: Mapping[str, Any], theirs: Any, rng: random.Random, *, kinds: bool = True) -> None:
    """The ids of `theirs`, a tokenizer of transformers, on random texts and pairs, and which text each is of."""
    ours = OwnTokenizer(build(metadata, NOWHERE), TokenizerFiles(), "file")
    for _ in range(300):
        text, second = random_text(rng), f"{random_text(rng)} a"
        assert ours.encode(text) == theirs(text)["input_ids"], text
        found, expected = ours.encode_texts(text, second), theirs(text, second, return_token_type_ids=True)
        assert found.ids == expected["input_ids"]
        if kinds:
            types = expected["token_type_ids"]
            assert found.second == (types.index(1) if 1 in types else 0)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("accents", [None, True, False])
def test_word_pieces_are_those_of_the_vocabularys_maker(lower: bool, accents: bool | None) -> None:
    """Whether a vocabulary was lowered, and whether it lost its accents, it says itself."""
    import transformers

    print(f"seed {SEED}")
    rng = random.Random(SEED)
    maker = transformers.BertTokenizer(do_lower_case=lower, strip_accents=accents)
    normalize = maker.backend_tokenizer.normalizer.normalize_str
    # The mark itself no such vocabulary can hold.
    words = {word for _ in range(400) for word in normalize(random_text(rng).replace("\u2581", "")).split()}
    letters = sorted({letter for word in words for letter in word})
    pieces = {*letters, *(f"##{letter}" for letter in letters if rng.random() < 0.9), *rng.sample(sorted(words), 150)}
    pieces |= {f"##{word[1:4]}" for word in words if len(word) > 3}
    order = [*BERT_SPECIAL, *rng.sample(sorted(pieces), len(pieces))]
    vocabulary = {piece: at for at, piece in enumerate(order)}
    theirs = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=lower, strip_accents=accents)
    assert_same(word_pieces(vocabulary), theirs, rng)


def test_word_pieces_of_a_real_vocabulary() -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(real_models.minilm())
    theirs.backend_tokenizer.no_truncation()
    metadata = word_pieces(theirs.get_vocab())
    assert_same(metadata, theirs, random.Random(SEED))
    ours = OwnTokenizer(build(metadata, NOWHERE), TokenizerFiles(), "file")
    assert ours.decode(ours.encode("Unaffable, naïve words")) == "unaffable , naive words"
    # As older files are, and those whose writer has no key for it.
    bare = {key: value for key, value in metadata.items() if not key.endswith("_token_id")}
    assert build(bare, NOWHERE).encode("a b").ids == ours.encode("a b")


def byte_level(rng: random.Random, special: tuple[str, ...]) -> RustTokenizer:
    """A trained byte-level vocabulary whose first ids are those of the special tokens."""
    from tokenizers import pre_tokenizers

    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet)
    rust.train_from_iterator([random_text(rng) for _ in range(300)], trainer)
    return rust


def bytes_of_a_file(rust: RustTokenizer, special: tuple[str, ...], pre: str, **keys: Any) -> dict[str, Any]:
    import json

    model = json.loads(rust.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda token: model["vocab"][token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def test_roberta() -> None:
    import json

    import transformers

    rng = random.Random(SEED)
    rust = byte_level(rng, ROBERTA_SPECIAL)
    model = json.loads(rust.to_str())["model"]
    theirs = transformers.RobertaTokenizer(vocab=model["vocab"], merges=[tuple(each) for each in model["merges"]])
    keys = {"bos_token_id": 0, "eos_token_id": 2, "seperator_token_id": 2}
    # Kinds of tokens there are none, which its newest tokenizer's types do not say.
    assert_same(bytes_of_a_file(rust, ROBERTA_SPECIAL, "roberta-bpe", **keys), theirs, rng, kinds=False)


def test_modern_bert() -> None:
    import transformers
    from tokenizers import decoders, normalizers, processors

    rng = random.Random(SEED)
    rust = byte_level(rng, BERT_SPECIAL)
    rust.normalizer, rust.decoder = normalizers.NFC(), decoders.ByteLevel()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=rust)
    keys = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True, "seperator_token_id": 3}
    metadata = bytes_of_a_file(rust, BERT_SPECIAL, "modern-bert", cls_token_id=2, **keys)
    assert_same(metadata, theirs, rng)


def unigram(pieces: list[tuple[str, float]], **keys: Any) -> dict[str, Any]:
    special = {"<s>": CONTROL, "<pad>": CONTROL, "</s>": CONTROL, "<unk>": UNKNOWN, "<mask>": CONTROL}
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [special.get(piece, NORMAL) for piece, _ in pieces],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        **keys,
    }


def test_unigrams() -> None:
    import transformers

    rng = random.Random(SEED)
    texts = [random_text(rng).split() for _ in range(300)]
    words = sorted({f"\u2581{word}"[start : start + rng.randrange(1, 6)]
                    for text in texts for word in text for start in range(4)} - {""})  # fmt: skip
    pieces = [(name, 0.0) for name in ROBERTA_SPECIAL]
    pieces += [(word, -12 * rng.random()) for word in rng.sample(words, len(words) // 2)] + [("<mask>", 0.0)]
    theirs = transformers.XLMRobertaTokenizer(vocab=pieces)
    assert_same(unigram(pieces), theirs, rng, kinds=False)


def test_unigrams_of_a_real_vocabulary() -> None:
    import transformers

    file = FOLDER / "ggml-vocab-nomic-bert-moe.gguf"
    if not file.is_file():
        pytest.skip("llama.cpp's vocabularies are not here: python tests/runtime/text/llama_vocab.py")
    metadata = read_gguf_header(file).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    charsmap = bytes(metadata["tokenizer.ggml.precompiled_charsmap"])
    theirs = transformers.XLMRobertaTokenizer(
        vocab=list(zip(tokens, scores, strict=True)), _spm_precompiled_charsmap=charsmap
    )
    assert_same(metadata, theirs, random.Random(SEED), kinds=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.scores": [1.0]}, "one score for each of"),
        ({"tokenizer.ggml.tokens": ["a"] * 5, "tokenizer.ggml.bos_token_id": None}, "no tokenizer.ggml.cls_token_id"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    pieces = [(name, 0.0) for name in (*ROBERTA_SPECIAL, "a")]
    with pytest.raises(ModelError, match=says):
        build(unigram(pieces) | changes, NOWHERE)
