"""`stoker bench`: engine, start, HTTP load, accuracy and structured output, measured through what serves.

Every figure stands beside a check that the output was right. A new mode is a `*_mode.py` with `main(argv)` and a line
in `cli.py`; rows of other engines go into `peers.json`.
Must never know: anything that the server does only for benchmarks.
"""
