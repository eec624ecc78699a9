"""The books of KV pages: which are free, which hold a known prefix, which rest in host memory. Pure.

`manager.py` deals pages out and counts who shares them, `prefix_index.py` finds known prefixes, `host_pool.py` keeps
the books of host memory, `snapshots.py` and `host_states.py` those of states; another place where pages can rest gets
its books here. How pages move is the executor's (`executor/page_swap.py`).
Must never know: what lies in a page, devices, requests.
"""
