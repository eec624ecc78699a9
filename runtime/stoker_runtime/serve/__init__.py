"""The server's processes: ports, TLS, several API processes, start, drain and stop.

Must never know: what a route answers, what a flag is called. What the engine's process needs too belongs in `process/`.
"""
