"""The server's processes: ports, settings, flags, TLS, logs, start, drain and stop.

Must never know: what a route answers.
"""
