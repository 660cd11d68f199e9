"""A drafter of the catalogue whose model has a place: here until it is given a process of its own.

What it needs to be placed is plain data (:class:`Place`): which layers of the target draft, how, and how far
away. Where it sits decides about time alone, so an engine that nobody placed (a measurement, a test) drafts
with the same messages in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workbench.models.decoder import Decoder
from workbench.spec.errors import InvariantError, OptionError
from workbench.speculative.draft_model import cut_out, layers_kept
from workbench.speculative.placement.here import HereLink, Unplaced
from workbench.speculative.placement.mirror_worker import MirrorWorker, Windows
from workbench.speculative.placement.remote import Link, RemoteDrafter
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.placement.worker import DraftWorker, Growth, Worker

HERE_BATCHES = 4
"""Batches that a tree grows by between two steps where it has no process of its own."""

Where = Literal["process", "here"]


@dataclass(frozen=True)
class Place:
    """``layers`` of the target that draft; ``how``: a free tree, or windows with branches.

    ``where``: a process of its own, if there is somebody who starts it, on ``device``; ``pin`` binds it to a
    core. ``delay``: seconds that each message is held back on its way, as on a slower link.
    """

    layers: tuple[int, ...]
    how: Growth | Windows
    where: Where = "process"
    device: str = "cpu"
    pin: bool = True
    delay: float = 0.0


def draft_layers(owner: str, target: int, asked: int) -> tuple[int, ...]:
    """Numbers of the target's layers that draft. Raises :class:`OptionError` for as many as it has."""
    if asked >= target or target < 2:
        raise OptionError(
            f"{owner}.layers = {asked} is too many: the target has {target}.",
            hint=f"Choose {target - 1} at most." if target > 1 else "Choose another drafter.",
        )
    return layers_kept(target, asked)


def worker_of(kv: TreeKV, how: Growth | Windows) -> Worker:
    """The drafter's side, of either kind."""
    return MirrorWorker(kv, how) if isinstance(how, Windows) else DraftWorker(kv, how)


class PlacedDrafter(RemoteDrafter):
    """The ``drafter`` seam of both techniques; :meth:`place` before the first sequence."""

    def __init__(self, name: str, place: Place, *, budget: int, patience: float, max_nodes: int = 64) -> None:
        super().__init__(Unplaced(), budget=budget, patience=patience, max_nodes=max_nodes)
        self.name = name
        self.wanted = place

    def attach_target(self, target: Decoder) -> None:
        """The target: until it is placed, its layers draft here, on the same storages."""
        self._vocab = target.config.vocab_size
        kv = TreeKV(cut_out(target, self.wanted.layers))
        batches = 0 if isinstance(self.wanted.how, Windows) else HERE_BATCHES
        self._link = HereLink(worker_of(kv, self.wanted.how), batches)

    def place(self, link: Link, numbers: Iterator[int]) -> None:
        """From now on its model is at the other end of ``link``; ``numbers`` name streams on it."""
        if self.books:
            raise InvariantError(f"{self.name} is placed while it drafts.")
        self._link, self._numbers = link, numbers
