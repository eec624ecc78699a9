"""How much each caller may ask for in a minute: the rule, the ledger that all API processes share, and the charges.

Must never know routes, bodies or engines. What a request costs is said by those who make its work.
"""
