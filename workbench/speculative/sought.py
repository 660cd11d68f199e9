"""A trained file that is used where there is one: what was found, or why what is there is not used.

Whoever insists on the file gets the error itself; whoever does not goes on without it, and is told why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from workbench.spec.errors import HeadMismatch, MissingHead

Found = TypeVar("Found")


@dataclass(frozen=True)
class Sought(Generic[Found]):
    """``trouble``: why a file that is there is of no use, and the way out; empty where there is none."""

    found: Found | None = None
    trouble: str = ""


def sought(read: Callable[[], Found | None]) -> Sought[Found]:
    """What ``read`` finds; nothing where it raises :class:`MissingHead` or :class:`HeadMismatch`."""
    try:
        return Sought(read())
    except MissingHead:
        return Sought()
    except HeadMismatch as error:
        return Sought(trouble=str(error))
