"""The drafter's side of a step: who is drafted for, within which room, and what it is told afterwards.

A sequence's drafter state begins at its first draft and is forgotten when the sequence ends or is
preempted, so that it always equals the committed ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workbench.engine.draft_law import RequestLaw
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.draft_seams import DraftContext, Drafter, DraftTree, FeatureDrafter, WarningDrafter
from workbench.engine.exit_runner import Entry, ExitRunner
from workbench.engine.sampling import until_end, within
from workbench.engine.scheduler import Batch
from workbench.engine.seams import StepPlan
from workbench.engine.sequence import Sequence
from workbench.engine.split_runner import SplitRunner
from workbench.spec.errors import InvariantError
from workbench.spec.events import TokenInfo

Runner = DraftRunner | ExitRunner | SplitRunner


class Drafting:
    """A drafter, or none, and the sequences it knows; ``runner`` if it has layers of its own, or of the
    target. ``ends``: tokens that end a request."""

    def __init__(
        self,
        drafter: Drafter | None,
        runner: Runner | None = None,
        vocab_size: int = 0,
        ends: Collection[int] = (),
    ) -> None:
        self.drafter = drafter
        self._vocab_size = vocab_size
        self._ends = ends
        self.runner = runner
        self._shown = drafter if isinstance(drafter, FeatureDrafter) else None
        self._warning = drafter if isinstance(drafter, WarningDrafter) else None
        self._known: set[int] = set()

    @property
    def features(self) -> tuple[int, ...]:
        """Layers whose input the drafter is shown."""
        return self._shown.features if self._shown is not None else ()

    def meet(self, seq: Sequence) -> None:
        """A sequence is about to be run: a drafter that is shown hidden states knows it from now on."""
        if self._shown is not None and seq.id not in self._known:
            self._begin(seq)

    def know(self, seq: Sequence) -> None:
        """A sequence is drafted for from now on, by whatever means."""
        if seq.id not in self._known:
            self._begin(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` starts behind the prompt of ``parent``: what was shown of it is not shown again."""
        if self._shown is not None and parent.id in self._known:
            self._begin(child)
            self._shown.fork(parent.id, child.id)

    @property
    def max_draft(self) -> int:
        """Most tokens ever drafted per sequence and step."""
        return self.drafter.max_draft if self.drafter is not None else 0

    def propose(self, batch: Batch, reserve: Callable[[Sequence, int], bool]) -> dict[int, DraftTree]:
        """Drafts by sequence id. Raises :class:`InvariantError` for one larger than its room, and for an id
        that the target lacks.

        ``reserve(seq, slots)`` makes slots writable, for a drafter that writes K and V of its own.
        """
        if self.drafter is None:
            return {}
        contexts, asked = [], []
        for seq, room in zip(batch.decodes, batch.room, strict=True):
            if room <= 0 or seq.siblings:
                continue
            if self.runner is not None and not reserve(seq, seq.computed + 1 + room):
                continue
            if seq.id not in self._known:
                self._begin(seq)
            asked.append(seq)
            contexts.append(
                DraftContext(seq.id, seq.tokens, room, seq.params.greedy, RequestLaw(seq, self._vocab_size))
            )
        trees = self.drafter.propose(contexts) if contexts else []
        out = {}
        for seq, c, tree in zip(asked, contexts, trees, strict=True):
            n = len(tree.tokens) if tree is not None else 0
            if n > c.room:  # it would cross the budget, the page pool or a codec's boundary
                raise InvariantError(f"{self.drafter.name} drafted {n} tokens where {c.room} were asked for.")
            if tree is not None:
                self._check(tree)
            tree = _possible(seq, tree, self._ends) if tree is not None and n else None
            if tree is not None and tree.tokens:
                out[seq.id] = tree
        return out

    def _check(self, tree: DraftTree) -> None:
        """Raise :class:`InvariantError` for an id that the target lacks: it has no embedding."""
        lacks = [t for t in tree.tokens if t < 0 or t >= self._vocab_size]
        if lacks:
            raise InvariantError(
                f"{tree.source} drafted token {lacks[0]}; the target has {self._vocab_size}."
            )

    def enter(self, plan: StepPlan, *, whole: bool) -> Entry:
        """Where the model's pass over a step begins: behind layers that drafted or were shown, unless it is
        ``whole``."""
        split = isinstance(self.runner, ExitRunner | SplitRunner) and not whole
        return self.runner.enter(plan) if split else Entry()  # type: ignore[union-attr]

    def before_commit(
        self, seq: Sequence, start: int, computed: int, rows: Seq[int], captured: Mapping[int, Tensor]
    ) -> None:
        """The KV of the first ``computed`` tokens is about to become final.

        Those from ``start`` on are ``rows`` of ``captured``, by layer: a drafter that asked is shown them,
        unless nothing was captured because it knows them.
        """
        if self._shown is not None and rows and captured and (seq.finish is None or self.runner is not None):
            streams = [captured[layer] for layer in self._shown.features]
            self._shown.observe(seq.id, start, [_rows(stream, rows) for stream in streams])
        if self.runner is not None:
            self.runner.complete(seq, computed)

    def after_commit(self, seq: Sequence) -> None:
        """It became final."""
        if self.runner is not None:
            self.runner.commit(seq)

    def commit(self, seq: Sequence, infos: Seq[TokenInfo]) -> None:
        """Tell the drafter which tokens the sequence gained."""
        if self.drafter is not None and infos and seq.id in self._known:
            self.drafter.commit(seq.id, [i.id for i in infos])

    def _begin(self, seq: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.begin(seq.id, seq.tokens)
            self._known.add(seq.id)
        if self.runner is not None:
            self.runner.begin(seq)

    def forget(self, seq: Sequence) -> None:
        """The sequence ended, or starts over."""
        if self.runner is not None:
            self.runner.forget(seq.id)
        if self.drafter is not None and seq.id in self._known:
            self.drafter.forget(seq.id)
            self._known.discard(seq.id)

    def warnings(self) -> tuple[str, ...]:
        """What the drafter has to say since it was last asked."""
        return self._warning.warnings() if self._warning is not None else ()

    def nbytes(self) -> int:
        """Bytes of draft state."""
        return self.drafter.nbytes() if self.drafter is not None else 0


def _possible(seq: Sequence, tree: DraftTree, ends: Collection[int]) -> DraftTree:
    """What a request can gain of a draft: the rest would cost rows and count as drafted.

    Nothing behind a token that ends it, nor what its mask forbids. Where the mask fails it forbids nothing:
    verification asks it again, and tells.
    """
    if ends and not seq.params.ignore_eos:
        tree = until_end(tree, ends)
    if seq.request.mask is None:
        return tree
    try:
        return within(seq.request.mask, tree, seq.generated)
    except Exception:
        return tree


def _rows(x: Tensor, rows: Seq[int]) -> Tensor:
    """Rows [n, H] of ``x``: a view where they follow one another."""
    if rows[-1] - rows[0] == len(rows) - 1:  # they ascend
        return x[rows[0] : rows[-1] + 1]
    return x.index_select(0, torch.tensor(rows, device=x.device))
