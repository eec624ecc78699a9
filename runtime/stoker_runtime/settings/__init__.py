"""Flags, variables and files → `config.py`: one table, its reader, and vLLM's flags that are no settings here.

A new flag is a `Flag` in `flags.py` and a field in `config.py`; a flag of vLLM's that Stoker takes or refuses without a
setting is a line in `vllm_flags.py`, `vllm_ignored.py` or `vllm_refused.py`.
Must never know: what a setting does.
"""
