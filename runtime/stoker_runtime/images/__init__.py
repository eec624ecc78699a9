"""Images of requests: fetched, decoded, resized for the model, and given their places among a prompt's ids.

What a family of models asks of an image is read in `rule.py`; a new family begins there.
Must never know: torch, HTTP routes, the engine. Pixels leave here as bytes, not normalised: the engine does that on
the device, by the rule's `mean`, `std` and `rescale`.
"""
