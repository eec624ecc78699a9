"""When a service has no pods: `decide.py` takes the steps there and back, `words.py` says where it stands.

Must never know: how requests are held meanwhile.
A new cause to wake: `_wish` in `decide.py`.
"""
