"""A second revision beside the stable one: `decide.py` takes the steps, `judge.py` says whether it is good enough,
`words.py` says where it stands.

Must never know: how pods are asked, and how the stable ones are rolled out.
A new state: its name in `manifests/canary.py`, its steps in `decide.py`, its words in `words.py`.
"""
