"""Ranks on several machines: how nodes find each other, what they must prove and have alike, what goes between them.

    leader.py     node 0's end: lets the others join, tells them of each step, hears how their ranks fare
    member.py     another node's end: joins, starts its ranks, passes on what it is told
    handshake.py  who is let in: both know the secret, and have the same program, model and settings
    connection.py what is sent: frames that only who knows the secret can make

Must never know: what a step is, how ranks compute. Another thing that nodes must have alike is a line of `terms.py`.
"""
