"""What becomes of a revision that moves (spec.model.updatePolicy: Follow): `lookups.py` says when it is looked up and
what was found, `decide.py` fetches a new commit beside the one that serves, and puts it in its place.

Must never know: how a source is asked; how a change reaches the pods.
"""
