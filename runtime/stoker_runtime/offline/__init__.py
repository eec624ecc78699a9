"""`LLM`: the engine in the caller's own process, its options, prompts, results and records, under vLLM's names.

Must never know: HTTP.
"""
