"""The heap of a long training: large blocks go back to the system when they are freed.

Steps are of different sizes, and glibc keeps what large blocks leave behind: a training that never holds
more than 2 GiB at once grew to 12 GiB that way.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
LARGE = 1 << 20
"""Bytes from which a block is mapped and unmapped on its own."""


def keep_small() -> bool:
    """Ask for it, for this process; whether the C library knows how (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE)) and bool(mallopt(_TRIM_THRESHOLD, LARGE))
