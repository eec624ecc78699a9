"""Text to token ids and back: tokenizers, detokenizer, chat templates.

A new kind of tokenizer is read in `tokenizer.py`, from GGUF in `gguf_tokenizer.py`, of encoders in
`gguf_encoder_tokenizer.py`.
Must never know: requests, HTTP, the engine.
"""
