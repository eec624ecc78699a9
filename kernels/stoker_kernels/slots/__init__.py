"""The state of each slot on the device: last token, position, page table row; updated in place, packed.

Must never know: requests. A new field of a slot: `op.py`, `reference.py`, `triton_slots.py`.
"""

from stoker_kernels.slots.op import apply_updates, commit_tokens, pack_updates, prepare_decode

__all__ = ["apply_updates", "commit_tokens", "pack_updates", "prepare_decode"]
