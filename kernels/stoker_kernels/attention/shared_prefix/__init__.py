"""Decode attention of rows that begin with the same pages: those are read once for all rows, and not once for each.

`op.py` holds what `attention` makes public, `space.py` what a step keeps in memory, `reference.py` the oracle and the
way on a CPU. On a GPU `triton_shared.py` has the kernels and `launch.py` launches them; the kernels of `attention`
attend what a row has of its own, and merge both. `config.py` holds tiles, parts and the rule of when it pays,
`variants.py` what is compiled ahead, `bench.py` checks and times.
Must never know: models, requests, who shares pages and why. What a step tells is AttentionMeta.
"""
