"""The state of each slot on the device: last token, position, page table row; updated in place, packed.

Must never know: requests.
"""

from stoker_kernels.slots.op import apply_updates, commit_tokens, pack_updates, prepare_decode

__all__ = ["apply_updates", "commit_tokens", "pack_updates", "prepare_decode"]
