"""Tiny Qwen3 models with a tokenizer that has Qwen's special tokens, and the published recipes for them, by
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
WORDS = ("yes", "no", "Ġquery", "Ġdocument")
QUERY_PROMPT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
# The reranker's card, word for word.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def tokenizer(folder: Path, *, appends_eos: bool) -> int:
    """Write a tokenizer of bytes and a few words; how many tokens it has."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: at for at, word in enumerate((*characters, *WORDS))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        whole = word[0]
        for character in word[1:]:
            vocabulary.setdefault(whole + character, len(vocabulary))
            merges.append((whole, character))
            whole += character
    rust = RustTokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    end = rust.token_to_id(SPECIAL[0])
    if appends_eos:
        rust.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIAL[0]}", pair=f"$A $B {SPECIAL[0]}", special_tokens=[(SPECIAL[0], end)]
        )
    rust.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(rust.get_vocab_size(with_added_tokens=True))


def qwen3(folder: Path, *, kind: str = "Qwen3ForCausalLM", appends_eos: bool = False, **settings: Any) -> Any:
    """A random tiny Qwen3 in `folder`, and transformers' model of it."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    size = tokenizer(folder, appends_eos=appends_eos)
    config = transformers.Qwen3Config(
        vocab_size=size + 3, hidden_size=72, intermediate_size=88, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=20, max_position_embeddings=2048, pad_token_id=size, **settings,
    )  # fmt: skip
    torch.manual_seed(23)
    model = getattr(transformers, kind)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(folder)
    return model


def embedding_model(folder: Path) -> Any:
    """As Qwen3-Embedding is published: sentence-transformers' modules and prompts beside the decoder."""
    model = qwen3(folder, appends_eos=True, tie_word_embeddings=True)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 72, "pooling_mode_lasttoken": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": QUERY_PROMPT, "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return model


def ids_of(folder: Path, text: str, **options: Any) -> list[int]:
    """The ids of a text by transformers' tokenizer of the folder."""
    import transformers

    found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids: list[int] = found(text, **options)["input_ids"]
    return ids


def embedded(folder: Path, model: Any, text: str) -> Tensor:
    """The card's recipe: the last token's state of a text, of unit length."""
    with torch.no_grad():
        states = model(torch.tensor([ids_of(folder, text)]), output_hidden_states=True).hidden_states[-1][0]
    return torch.nn.functional.normalize(states[-1], dim=0)


def judged(folder: Path, model: Any, query: str, document: str, instruction: str = TASK) -> float:
    """The card's recipe: the probability of "yes" against "no" behind the prompt."""
    import transformers

    rust = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = [
        *rust.encode(PREFIX, add_special_tokens=False), *rust(pair)["input_ids"],
        *rust.encode(SUFFIX, add_special_tokens=False),
    ]  # fmt: skip
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    both = torch.stack([logits[rust.convert_tokens_to_ids(each)] for each in ("no", "yes")])
    return float(torch.log_softmax(both, dim=0)[1].exp())
