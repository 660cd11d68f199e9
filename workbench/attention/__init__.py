"""Attention over pages: the float64 definition, the fast torch form, and the bit-reproducible form.

All three take the same spans and the same page pool and differ only in the order of arithmetic
(``reference``: the oracle; ``pages``: fast class; ``pinned``: pinned class). ``sdpa`` is the
catalogue entry that binds one of the last two.
"""
