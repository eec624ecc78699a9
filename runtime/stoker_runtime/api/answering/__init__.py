"""One model that answers: the state of a server, and a request on its way to the engine and back.

`intake.py` hands routes what they need; `prompts.py` and `work.py` make tokens and parameters; `streams.py` and
`loopback.py` send what comes out. Must never know: what the answers of a dialect look like.
What several dialects do with a request goes here; what one alone does stays with it.
"""
