"""Several processes that run one model: started, told of each step through shared memory, watched, ended together.

On several machines, too: what is between those is in `nodes/`.

Must never know: how a model is cut or computed (`parallel/`, `executor/`), why a step is what it is. Another command
to the ranks is a kind in `wire.py`; another fault that ends them, a rule in `watch.py`.
"""
