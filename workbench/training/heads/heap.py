"""The heap of a long training: what large blocks leave behind goes back to the system now and then.

Steps are of different sizes, and glibc keeps what freed blocks leave behind: a training that never holds
more than 2 GiB at once grew to 12 GiB that way. A block that is mapped anew each time costs a fault per page:
mapping everything from a mebibyte on took a third of a training's time. So only the largest are, and what is
free among the others is given back between steps.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGE = 1 << 25
"""Bytes from which a block is mapped and unmapped on its own: as much as glibc allows."""
KEPT = 1 << 30
"""Bytes at the top of the heap that are kept for the next step."""


def keep_small() -> bool:
    """Ask for it, for this process; whether the C library knows how (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))


def give_back() -> bool:
    """Give what is free in the heap back to the system; whether there was anything (glibc)."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return False
    return bool(trim(0))
