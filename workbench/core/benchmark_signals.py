"""The stack on which signals of a thread are handled, kept as it was while a library is loaded.

OpenVINO's CPU plugin gives the thread that loads it an alternate signal stack of its own, one per plugin
object, and when they are destroyed in another order than last-in first-out a freed one stays in place. Python
handles signals on the alternate stack (``SA_ONSTACK``), so the next Ctrl-C would end the process. A plugin
object that finds another stack than its own in place leaves it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator


class SignalStack(ctypes.Structure):
    """``stack_t`` of Linux, see sigaltstack(2)."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def exchange_signal_stack(new: SignalStack | None = None) -> SignalStack:
    """The calling thread's alternate signal stack, exchanged for ``new`` when given."""
    old = SignalStack()
    given = None if new is None else ctypes.byref(new)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(given, ctypes.byref(old)) != 0:
        raise OSError(ctypes.get_errno(), "sigaltstack failed")
    return old


@contextlib.contextmanager
def same_signal_stack() -> Iterator[None]:
    """Put the stack that was there back after the block; does nothing on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        yield
        return
    before = exchange_signal_stack()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # too small for a register set that was enabled meanwhile
            exchange_signal_stack(before)
