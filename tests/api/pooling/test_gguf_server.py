"""`stoker serve` with a real encoder as a GGUF file in blocks, and the `openai` client."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import openai
import torch
from server_process import ServerProcess
from tests.real_models import minilm
from tests.runtime.text.test_gguf_encoder_tokenizer import word_pieces
from tests.runtime.weights import gguf_encoders

SENTENCES = ["What is the capital of France?", "Paris is the capital of France.", "Größe und naïveté, 日本語 🙂"]


def test_vectors_of_a_file_alone(tmp_path: Path) -> None:
    import transformers

    def blocks(tensor: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType.Q8_0 if tensor.startswith("blk.") else gguf.GGMLQuantizationType.F16

    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    model = transformers.AutoModel.from_pretrained(minilm()).eval()
    file = tmp_path / "minilm.gguf"
    mean, words = gguf.PoolingType.MEAN, word_pieces(tokenizer.get_vocab())
    gguf_encoders.write(minilm(), file, mean, blocks, tokenizer=words)
    program = [sys.executable, "-m", "stoker_cli", "serve", str(file)]
    process = ServerProcess(program, "--served-model-name", "minilm", "--device", "cpu")
    try:
        url = process.wait_ready(120).url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
            found = client.embeddings.create(model="minilm", input=SENTENCES)
    finally:
        process.close()
    for sentence, each in zip(SENTENCES, found.data, strict=True):
        with torch.no_grad():
            states = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
        assert np.dot(each.embedding, expected) > 0.999
