"""Text of a growing sequence, as the engine needs it: pieces that are never taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class TextStream(Protocol):
    """Turns committed ids into text pieces whose concatenation is the decoding of all ids."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that became certain with these ids; characters still in parts are held back."""
        ...

    def finish(self) -> str:
        """Whatever is still held back, at the end of the sequence."""
        ...


MakeStream = Callable[[], TextStream]
