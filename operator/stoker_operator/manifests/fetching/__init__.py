"""Pods that run `stoker fetch`, but for the prefetch's own Job and verifications, which are of the cache.

`asking.py` has what they share: containers, arguments, credentials. A Job with another purpose is a module beside it.
Must never know: volumes' names and lives, and what follows from what a fetch reports.
"""
