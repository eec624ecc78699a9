"""What every process of a server has: its log, its age, its parent, its exit status, the numbers it shares.

Must never know: which process it is. What only the server needs belongs in `serve/`.
"""
