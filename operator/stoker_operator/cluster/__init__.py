"""The API server, leadership and the work queue.

Must never know: what the objects mean.
"""
