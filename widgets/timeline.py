"""Undo and redo over immutable values."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")
_DEPTH = 200


class Timeline(Generic[T]):
    """A current value with its past and future; a new value cuts the future off."""

    def __init__(self, first: T) -> None:
        self._past: list[T] = []
        self._future: list[T] = []
        self.now = first

    def push(self, value: T) -> None:
        """Go on to ``value``; equal values add no step."""
        if value == self.now:
            return
        self._past = [*self._past, self.now][-_DEPTH:]
        self._future.clear()
        self.now = value

    def back(self) -> T | None:
        """The value :meth:`undo` would go to."""
        return self._past[-1] if self._past else None

    def ahead(self) -> T | None:
        """The value :meth:`redo` would go to."""
        return self._future[-1] if self._future else None

    def undo(self) -> None:
        """One step back, if there is one."""
        if self._past:
            self._future.append(self.now)
            self.now = self._past.pop()

    def redo(self) -> None:
        """One step ahead, if there is one."""
        if self._future:
            self._past.append(self.now)
            self.now = self._future.pop()
