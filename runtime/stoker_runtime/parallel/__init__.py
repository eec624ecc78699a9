"""One rank's share of a model: which part, how it is cut from the files, and what it exchanges with the other ranks.

Must never know: processes, scheduling, requests. How ranks are started, fed and watched is `ranks/`. Another way to
split a parameter is an entry of `split.py`; another exchange a method of `collectives.py`.
"""
