"""`LLM`: the engine in the caller's own process, its options, records, beams, chats and vectors, under vLLM's names.

A new method of `LLM` goes into `llm.py`. What callers import by vLLM's module names lies in the package's root
(`inputs.py`, `outputs.py`, `sampling_params.py`); a public name is also listed in `stoker_runtime/__init__.py`.
Must never know: HTTP.
"""
