"""One immutable snapshot of everything a plan may depend on: children, pods, nodes, what pods say of themselves.

Must never know: what should be done.
"""
