"""Draft control that goes inside a draft: where it leaves the target's layers, and how far.

It sees the laws that exit layers give before it decides, and tokens only after they were drafted: what it
decides never takes back a token, so the law of the output stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from workbench.engine.control import DraftControl
from workbench.engine.draft_seams import DraftContext


@runtime_checkable
class ExitControl(DraftControl, Protocol):
    """A control of exits and lengths; sequences of a step leave behind the same layer."""

    longest: int  # most tokens it lets be drafted

    def exits(self, contexts: Sequence[DraftContext]) -> tuple[Sequence[int], Sequence[int]]:
        """Which of ``contexts`` (by index) are drafted for, and the layers whose laws it wants, rising."""
        ...

    def leave(self, contexts: Sequence[DraftContext], logits: Tensor, layers: int) -> bool:
        """Whether to draft behind ``layers``; ``logits`` [n, V] are those of the first draft there.

        Nothing is drafted where it does not want to leave behind the last layer it asked for.
        """
        ...

    def go_on(self, context: DraftContext, logits: Tensor, drafted: int) -> bool:
        """Whether another token follows the ``drafted`` ones; the newest was taken from ``logits`` [V]."""
        ...
