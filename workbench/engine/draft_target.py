"""A drafter that computes with parts of the model it drafts for."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from workbench.engine.draft_seams import Drafter
from workbench.models.decoder import Decoder


@runtime_checkable
class TargetDrafter(Drafter, Protocol):
    """The :class:`Drafter` seam, for heads: they use the target's own embedding, final norm or head."""

    def attach_target(self, target: Decoder) -> None:
        """The target's decoder, before the first sequence begins; what is copied of it counts as drafter.

        Raises :class:`HeadMismatch` when the drafter was trained for other weights.
        """
        ...


def attach_target(drafter: Drafter | None, target: Decoder) -> None:
    """Give a drafter its target, if it is one that needs it."""
    if isinstance(drafter, TargetDrafter):
        drafter.attach_target(target)
