"""Text to token ids and back: tokenizers, detokenizer, chat templates.

Must never know: requests, HTTP, the engine.
"""
