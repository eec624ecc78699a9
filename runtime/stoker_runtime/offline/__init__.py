"""`LLM`: the engine in the caller's own process, its options, prompts, results and records, under vLLM's names.

A new method of `LLM` goes into `llm.py`, its options and results into the module named after them; a public name is
also listed in `stoker_runtime/__init__.py`.
Must never know: HTTP.
"""
