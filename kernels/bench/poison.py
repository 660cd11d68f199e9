"""Memory that nobody wrote holds NaN (the largest value, for integers) for the length of a ``with`` block.

Wrappers allocate their outputs with ``torch.empty``; torch can fill that memory, which it does for its own
deterministic mode. An element that a kernel forgets to write then shows, whatever lay there before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what ``torch.empty`` and its kin return."""
    before = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before, warn_only=lenient)
