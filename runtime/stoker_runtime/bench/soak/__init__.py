"""`stoker bench soak`: a server under mixed load for minutes, and what it still holds afterwards.

`mode.py` reads top to bottom: start, one round of each kind of request, the load, the lone runs, the verdict; with
`--faults` the faults instead. A new kind of request is a function and a line in `kinds.py`, a new fault one in
`faults.py`.
Must never know: the server's code. It sees what a client, a scraper and /proc see.
"""
