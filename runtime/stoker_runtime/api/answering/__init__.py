"""A model that answers: the state of one server, and a request on its way to the engine and back.

Must never know: what the answers of a dialect look like, routes.
"""
