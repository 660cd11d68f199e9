"""What can go wrong in an emulated kernel, each a typed error that says where."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.spec.errors import KernelError


class EmulatorError(KernelError):
    """The kernel used the machine in a way that the hardware does not allow, or that is not emulated."""


class Race(EmulatorError):
    """An asynchronous read of shared memory that nothing orders after an ordinary write."""


class Deadlock(EmulatorError):
    """No partition can go on and no copy is on its way; ``waiting`` maps partition to barrier."""

    def __init__(self, waiting: Mapping[str, str]) -> None:
        told = "; ".join(f"{who} waits for {what}" for who, what in waiting.items())
        super().__init__(
            f"Deadlock: {told}.", hint="Compare arrivals, byte counts and parities of these barriers."
        )
        self.waiting = dict(waiting)


class Stopped(BaseException):
    """Unwinds the other partitions once one of them has failed; never leaves the emulator."""
