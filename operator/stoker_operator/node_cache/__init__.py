"""Keeps models on one node's own disk, for pods that may not see the node's folders. `stoker node-cache`.

`main.py` is the process, `settings.py` what it is told, `agent.py` the loop: `wishes.py` reads what pods' claims ask
for and answers with volumes, `disk.py` is the folder, `room.py` decides what is given up.
Must never know: InferenceServices, where models come from, any token.
Another thing that a claim may ask for: an annotation in `manifests/copies.py`, read in `wishes.py`.
"""
