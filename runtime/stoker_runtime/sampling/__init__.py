"""How tokens are chosen: on the device by slot (`sampler.py`), and by rules on the host (grammars, words, beams).

A new sampling parameter: its field in `request.py`, its place by slot in `sampler.py` and the `sampling` op, or as a
rule on the host in `token_rules.py`.
Must never know: HTTP, the scheduler's order.
"""
