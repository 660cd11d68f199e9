"""A drafter of the catalogue whose model has a place: here until it is given a process of its own.

What it needs to be placed is plain data (:class:`Place`): which layers of the target draft, how, and how far
away. Where it sits decides about time alone, so an engine that nobody placed (a measurement, a test) drafts
with the same messages in this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile
from workbench.models.plain import plain_pack
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import option
from workbench.speculative.distilled import distilled_decoder
from workbench.speculative.draft_model import cut_out, distilled_head, layers_kept
from workbench.speculative.head_options import drafted_vocab
from workbench.speculative.layer_options import layer_count, layer_source
from workbench.speculative.placement.here import HereLink, Unplaced
from workbench.speculative.placement.mirror_worker import MirrorWorker, Windows
from workbench.speculative.placement.remote import Link, RemoteDrafter
from workbench.speculative.placement.streams import StreamedKV, streams_of
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.placement.worker import DraftWorker, Growth, Worker

HERE_BATCHES = 4
"""Batches that a tree grows by between two steps where it has no process of its own."""

Where = Literal["process", "here"]


@dataclass(frozen=True)
class PlaceOptions:
    """Options that both techniques share: what drafts, and where it sits."""

    source: str = layer_source()
    layers: int = layer_count()
    vocab: int = drafted_vocab()
    place: str = option(
        "process",
        choices=("process", "here"),
        help="A process of its own, or this one: then nothing that it does is hidden.",
    )
    device: str = option("cpu", choices=("cpu", "cuda"), help="Device of the drafter's process.")
    pin: bool = option(True, help="Bind the drafter's process to the last core there is (where systems can).")
    delay: float = option(
        0.0, low=0.0, high=1000.0, unit="ms", help="Hold back every message, as on a slower link."
    )


@dataclass(frozen=True)
class Place:
    """``layers`` of the target that draft, or ``head``, layers that were distilled from them, which draft the
    ``vocab`` tokens that are said most often; ``how``: a free tree, or windows with branches.

    ``where``: a process of its own, if there is somebody who starts it, on ``device``; ``pin`` binds it to a
    core. ``delay``: seconds that each message is held back on its way, as on a slower link. ``notes``: what
    whoever runs it should know.
    """

    layers: tuple[int, ...]
    how: Growth | Windows
    where: Where = "process"
    device: str = "cpu"
    pin: bool = True
    delay: float = 0.0
    head: HeadFile | None = None
    vocab: int = 0
    notes: tuple[str, ...] = ()


def place_of(owner: str, config: Any, context: Any, how: Growth | Windows) -> Place:
    """The place that a technique's options (:class:`PlaceOptions`) ask for.

    Raises :class:`OptionError` for as many layers as the target has and a device that is not there, and where
    distilled layers are insisted on :class:`MissingHead` or :class:`HeadMismatch`.
    """
    layers = layers_kept(context.config.num_layers, config.layers, owner)
    if config.place == "process" and config.device != "cpu" and not torch.cuda.is_available():
        raise OptionError(f"{owner}.device = {config.device}: there is none.", hint="Set it to cpu.")
    head, notes = distilled_head(owner, config.source, config.layers, context)
    return Place(
        layers,
        how,
        cast(Where, config.place),
        config.device,
        config.pin,
        config.delay / 1e3,
        head,
        config.vocab,
        notes,
    )


def drafting_kv(
    target: Decoder, layers: Sequence[int], head: HeadFile | None, vocab: int, streams: int = 0
) -> TreeKV:
    """The drafter's model on its target, with KV of its own. Raises what :func:`streams_of` raises."""
    if head is None:
        decoder, ids = cut_out(target, layers), None
    else:
        weights, config = target.weights, target.config
        pack = plain_pack(weights.dtype, weights.numerics, str(weights.device), activation=config.activation)
        decoder, ids = distilled_decoder(head, vocab, target, pack)
    return StreamedKV(decoder, ids, streams_of(head, streams, decoder)) if streams else TreeKV(decoder, ids)


def streams_wanted(how: Growth | Windows) -> int:
    """Streams of the drafter's rows: a free tree has none, its nodes have many children as it is."""
    return how.streams if isinstance(how, Windows) else 0


def worker_of(kv: TreeKV, how: Growth | Windows) -> Worker:
    """The drafter's side, of either kind."""
    return MirrorWorker(kv, how) if isinstance(how, Windows) else DraftWorker(kv, how)


class PlacedDrafter(RemoteDrafter):
    """The ``drafter`` seam of both techniques; :meth:`place` before the first sequence."""

    def __init__(self, name: str, place: Place, *, budget: int, patience: float, max_nodes: int = 64) -> None:
        super().__init__(Unplaced(), budget=budget, patience=patience, max_nodes=max_nodes)
        self.name = name
        self.wanted = place
        self._notes = place.notes

    def attach_target(self, target: Decoder) -> None:
        """The target: until it is placed, its layers draft here, on the same storages."""
        self._vocab = target.config.vocab_size
        wanted, streams = self.wanted, streams_wanted(self.wanted.how)
        kv = drafting_kv(target, wanted.layers, wanted.head, wanted.vocab, streams)
        batches = 0 if isinstance(wanted.how, Windows) else HERE_BATCHES
        self._link = HereLink(worker_of(kv, wanted.how), batches)

    def warnings(self) -> tuple[str, ...]:
        """What was found when it was made, and that nobody listens any more; each said once."""
        notes, self._notes = self._notes, ()
        return (*notes, *super().warnings())

    def place(self, link: Link, numbers: Iterator[int]) -> None:
        """From now on its model is at the other end of ``link``; ``numbers`` name streams on it."""
        if self.books:
            raise InvariantError(f"{self.name} is placed while it drafts.")
        self._link, self._numbers = link, numbers
