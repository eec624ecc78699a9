"""Files, and batches of requests that run beside those of clients.

Must never know: how a line is answered beyond `execute.py`. An endpoint that batches may name: `execute.py`.
"""
