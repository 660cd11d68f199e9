"""Drafters that know what comes next, and models that say what they are told.

A drafter that replays a known continuation is accepted as often as a test wants; a scripted model makes any
stream of tokens come out of a real engine, KV and all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.drafting import Drafting
from workbench.engine.engine import Engine


class Replay:
    """Drafts the next ``k`` tokens of whichever known text starts like the sequence.

    ``right`` says how many of them are right in a round (default all); the next one is wrong, and so are
    the tokens behind it. ``trees`` hangs the right path among wrong siblings, scattered over the tree.
    """

    name = "replay"

    def __init__(
        self,
        known: Sequence[Sequence[int]],
        k: int = 4,
        *,
        right: Callable[[int, int], int] | None = None,
        trees: bool = False,
        vocab: int = 61,
    ) -> None:
        self.known = [list(t) for t in known]
        self.max_draft = k
        self.right = right or (lambda seq, round: k)
        self.trees = trees
        self.vocab = vocab
        self.seen: dict[int, list[int]] = {}
        self.rounds: dict[int, int] = {}
        self.begun: list[int] = []
        self.forgotten: list[int] = []

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        if seq in self.seen:
            raise RuntimeError(f"sequence {seq} began twice")
        self.begun.append(seq)
        self.seen[seq] = list(tokens)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        return [self._one(c) for c in contexts]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        self.seen[seq].extend(tokens)

    def forget(self, seq: int) -> None:
        del self.seen[seq]
        self.forgotten.append(seq)

    def nbytes(self) -> int:
        return 8 * sum(len(t) for t in self.seen.values())

    def _one(self, context: DraftContext) -> DraftTree | None:
        tokens = list(context.tokens)
        if self.seen[context.seq] != tokens:
            raise RuntimeError("the drafter was not told what was committed")
        text = next((t for t in self.known if t[: len(tokens)] == tokens), tokens)
        n = min(self.max_draft, context.room)
        round = self.rounds[context.seq] = self.rounds.get(context.seq, -1) + 1
        good = text[len(tokens) : len(tokens) + min(n, self.right(context.seq, round))]
        if self.trees:
            return self._tree(good, n)
        draft = good + [self._wrong(tokens[-1], i) for i in range(n - len(good))]
        return DraftTree.chain(draft, self.name) if draft else None

    def _tree(self, good: list[int], n: int) -> DraftTree | None:
        """Before each right token a wrong sibling, as far as ``n`` nodes go."""
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for token in good:
            if len(tokens) + 2 > n:
                break
            tokens += [(token + 1) % self.vocab, token]
            parents += [at, at]
            at = len(tokens) - 1
        while len(tokens) < n:  # and a wrong child at the end, below the first node
            tokens.append(self._wrong(len(tokens), 3))
            parents.append(min(0, len(tokens) - 2))
        return DraftTree(tuple(tokens), tuple(parents), self.name) if tokens else None

    def _wrong(self, token: int, i: int) -> int:
        return (token * 7 + i * 11 + 5) % self.vocab


def attach(engine: Engine, drafter: Any) -> Engine:
    """Put a drafter into an engine that was built with ``ngram``."""
    engine.drafting = Drafting(drafter, None, engine.vocab_size, engine.eos_ids)
    return engine


def say(engine: Engine, next_id: Callable[[int, int], int | torch.Tensor]) -> Callable[[], None]:
    """Replace logits: after absolute position ``p`` of sequence ``s`` comes ``next_id(s, p)``.

    A tensor is taken as the logits row itself. K and V stay the model's own. Returns an undo.
    """
    prepare, forward = engine.executor.prepare, engine.executor.forward
    plans: list[Any] = []

    def spy(plan: Any) -> Any:
        plans.append(plan)
        return prepare(plan)

    def scripted(step: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(step, *args, **kwargs)
        rows = []
        for span in plans.pop().spans:
            for j in range(span.n_new - span.logits, span.n_new):
                wanted = next_id(span.seq, span.positions[j])
                row = torch.full_like(out.logits[0], -4.0)
                if isinstance(wanted, torch.Tensor):
                    row = wanted.to(out.logits.dtype)
                else:
                    row[wanted] = 9.0
                rows.append(row)
        return replace(out, logits=torch.stack(rows) if rows else out.logits)

    engine.executor.prepare, engine.executor.forward = spy, scripted  # type: ignore[method-assign]

    def undo() -> None:
        engine.executor.prepare, engine.executor.forward = prepare, forward  # type: ignore[method-assign]

    return undo


def stream_of(text: dict[int, str]) -> Callable[[], Any]:
    """A text stream that maps ids to pieces of text."""

    class Pieces:
        def push(self, ids: Sequence[int]) -> str:
            return "".join(text[i] for i in ids)

        def finish(self) -> str:
            return ""

    return Pieces


def stored(engine: Engine, seq: Any, upto: int | None = None) -> dict[str, torch.Tensor]:
    """Bytes [layers, ...] of the committed slots of a sequence in logical order, and their positions.

    Coded pages of a page-grain codec count whole; the open page by its slots.
    """
    out: dict[str, torch.Tensor] = {}
    size = engine.kv.page_size
    n = seq.computed if upto is None else upto
    for g, (store, table) in enumerate(zip(engine.kv.stores, seq.tables, strict=True)):
        slots = [table[i // size] * size + i % size for i in range(n)]
        out[f"{g}.positions"] = store.positions[slots].clone()
        full = table[: n // size]
        for spec in store.specs:
            plane = store.planes[spec.name]
            raw = plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
            if store.codec.grain == "page":
                out[f"{g}.{spec.name}"] = raw[:, full].clone()
            else:
                by_slot = raw.movedim(2 + spec.axes.index("slot"), 2)
                out[f"{g}.{spec.name}"] = by_slot[
                    :, [s // size for s in slots], [s % size for s in slots]
                ].clone()
        if store.codec.grain == "page" and n % size:
            row = store.held.open.rows[table[n // size]]
            for name, plane in store.held.open.planes.items():
                out[f"{g}.open.{name}"] = plane[:, row, :, : n % size].clone()
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two results of :func:`stored` agree byte for byte."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
