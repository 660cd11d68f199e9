"""A drafter that computes with parts of the model it drafts for, or with a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from workbench.engine.draft_seams import Drafter
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.weightset import Pack


@runtime_checkable
class TargetDrafter(Drafter, Protocol):
    """The :class:`Drafter` seam, for heads: they use the target's own embedding, final norm or head."""

    def attach_target(self, target: Decoder) -> None:
        """The target's decoder, before the first sequence begins; what is copied of it counts as drafter.

        Raises :class:`HeadMismatch` when the drafter was trained for other weights.
        """
        ...


@runtime_checkable
class WeightsOfItsOwn(Drafter, Protocol):
    """A drafter that loads matrices of its own when it is given its target; ``bits`` per weight."""

    bits: int

    def pack_with(self, pack: Callable[[ModelConfig], Pack]) -> None:
        """How weights are held that belong to a model of that configuration."""
        ...


def attach_target(drafter: Drafter | None, target: Decoder, pack: Callable[[ModelConfig, int], Pack]) -> None:
    """Give a drafter its target, if it is one that needs it; ``pack`` holds weights in so many bits."""
    if isinstance(drafter, WeightsOfItsOwn):
        bits = drafter.bits
        drafter.pack_with(lambda config: pack(config, bits))
    if isinstance(drafter, TargetDrafter):
        drafter.attach_target(target)
