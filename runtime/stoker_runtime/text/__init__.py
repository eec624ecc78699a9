"""Text to token ids and back: tokenizers, detokenizer, chat templates.

A new kind of tokenizer is read in `tokenizer.py`, from GGUF in `gguf_tokenizer.py`.
Must never know: requests, HTTP, the engine.
"""
