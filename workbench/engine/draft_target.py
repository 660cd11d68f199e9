"""A drafter that computes with parts of the model it drafts for."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from workbench.engine.seams import Drafter
from workbench.models.decoder import Decoder


@runtime_checkable
class TargetDrafter(Drafter, Protocol):
    """The :class:`Drafter` seam, for heads: they use the target's own embedding, final norm or head."""

    def attach_target(self, target: Decoder) -> None:
        """The target's decoder, before the first sequence begins; what is copied of it counts as drafter.

        Raises :class:`HeadMismatch` when the drafter was trained for other weights.
        """
        ...
