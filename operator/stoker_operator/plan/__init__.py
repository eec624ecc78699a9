"""Pure: (spec, observed, settings, now) → actions with reasons, conditions, when to look again.

Must never know: how a plan is carried out. No I/O and no clock.
"""
