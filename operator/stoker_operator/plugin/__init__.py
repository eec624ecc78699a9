"""`kubectl stoker`: what people ask of services from their own machine. One module a verb.

Everything that touches a cluster goes through the user's own kubectl (`kubectl.py`), with its contexts, plugins and
rights; what is shown and rendered is decided by the operator's own pure rooms, so that it is what the operator decides.
Must never know: credentials, and how an API server is spoken to.
A new verb: its module, a row of `VERBS` in `cli.py`, a line in docs/kubectl.md.
"""
