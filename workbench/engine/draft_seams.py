"""The seams of speculation: what a drafter proposes, from what, and how it is judged.

Like the others (:mod:`workbench.engine.seams`), with V for the vocabulary and H for the model's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens below the last committed token (the root, not stored here).

    ``parents[i]`` is the index of node ``i``'s parent, -1 for children of the root; parents come first.
    ``q`` is the law each node was drawn from, [n, V] float, or None when the draft is deterministic
    (n-gram, argmax, top-k), which decides between rules R2 and R3. ``confidence``: what a deterministic
    drafter gives each node, given its parent, where it knows; it is shown, and decides nothing, as ``exit``:
    the target's own layer behind which it was drafted, 0 where something else drafts.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    source: str
    q: Tensor | None = None
    confidence: tuple[float, ...] = ()
    exit: int = 0

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str, q: Tensor | None = None, exit: int = 0) -> DraftTree:
        """A draft without branches."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), source, q, exit=exit)

    @property
    def is_chain(self) -> bool:
        """True when every node continues the one before it."""
        return all(p == i - 1 for i, p in enumerate(self.parents))

    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; children of the root have depth 1."""
        out: list[int] = []
        for p in self.parents:
            out.append(1 if p < 0 else out[p] + 1)
        return tuple(out)

    def chances(self) -> tuple[float, ...]:
        """What the drafter gave each node, given its parent; empty where it does not say."""
        if self.q is None:
            return self.confidence
        rows = torch.arange(len(self.tokens), device=self.q.device)
        return tuple(self.q[rows, torch.tensor(self.tokens, device=self.q.device)].tolist())


class Pick(NamedTuple):
    """A drafted token and, where it was drawn, the law ``q`` [V] it was drawn from."""

    token: int
    q: Tensor | None


class DraftLaw(Protocol):
    """The processing that a request's own tokens go through, for the logits of a drafter's model.

    ``logits`` [V], or [n] of the tokens ``ids`` (int64 [n]) alone where a drafter has a smaller vocabulary;
    ``path``: drafted ids behind the newest committed token.
    """

    @property
    def processed(self) -> bool:
        """Whether a mask or penalties change what is likeliest."""
        ...

    def pick(
        self, logits: Tensor, path: Sequence[int], *, draws: bool, ids: Tensor | None = None
    ) -> Pick | None:
        """What follows: drawn, or the likeliest (temperature 0, or not ``draws``). None where nothing can."""
        ...

    def top(
        self, logits: Tensor, path: Sequence[int], k: int, *, ids: Tensor | None = None
    ) -> list[tuple[int, float]]:
        """The ``k`` likeliest tokens with the logarithms of their chances, likeliest first."""
        ...

    def siblings(
        self, logits: Tensor, path: Sequence[int], k: int, *, ids: Tensor | None = None
    ) -> tuple[list[int], Tensor] | None:
        """``k`` tokens drawn without replacement, in that order, and the law [V] of the first.

        Fewer where the law has fewer; None where nothing can follow.
        """
        ...


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may know of one sequence: all committed ids, and how many tokens may be drafted."""

    seq: int
    tokens: Sequence[int]
    room: int
    greedy: bool
    law: DraftLaw | None = None


class Drafter(Protocol):
    """Proposes what comes next. A wrong proposal costs time, never correctness."""

    name: str
    max_draft: int  # most tokens it proposes per sequence and step

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A sequence starts (or starts over after a preemption) with these committed ids."""
        ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """One draft per context, None for a plain decode; never more than ``room`` tokens in all."""
        ...

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """These ids were committed to the sequence (accepted drafts and the model's own)."""
        ...

    def forget(self, seq: int) -> None:
        """The sequence ended or was aborted."""
        ...

    def nbytes(self) -> int:
        """Bytes of draft state held."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that is shown hidden states of the target, of committed tokens only."""

    features: tuple[int, ...]  # layers whose input it is shown; as many as there are: what leaves the last

    def observe(self, seq: int, start: int, features: Sequence[Tensor]) -> None:
        """Streams [n, H], one per layer asked for, of the tokens ``start`` to ``start + n - 1``.

        In order of positions. Tokens that a prefix index gave are not shown: ``start`` then jumps.
        """
        ...

    def fork(self, seq: int, child: int) -> None:
        """What was shown of a sequence holds for ``child``, which begins with the same K and V."""
        ...


@runtime_checkable
class WarningDrafter(Drafter, Protocol):
    """A drafter that may lose what it drafts with; decoding then goes on without it."""

    def warnings(self) -> tuple[str, ...]:
        """What whoever runs it should know, each said once."""
        ...


@dataclass(frozen=True)
class Verdict:
    """Outcome of verification: accepted nodes in order, then one token of the model's own.

    ``corrected``: the extra token replaces a rejected draft (False: it follows a fully accepted path).
    ``expected``: Σ min(p, q) of each node that was reached (Rao–Blackwell estimate of acceptance).
    ``mismatch``: of lossy rules, the chance at each accepted node that the model itself would differ.
    ``rule``: what judged, where that is not the engine's ``Verify``.
    """

    path: tuple[int, ...]
    token: int
    corrected: bool
    expected: tuple[float, ...] = ()
    mismatch: tuple[float, ...] | None = None
    rule: str = ""


class Verify(Protocol):
    """Which drafted path is kept. ``exact`` rules leave the output law unchanged."""

    name: str
    exact: bool

    def rule_for(self, tree: DraftTree, *, greedy: bool) -> str:
        """Name of the rule that judges a draft, e.g. ``r1``."""
        ...

    def greedy(self, tree: DraftTree, best: Sequence[int]) -> Verdict:
        """Temperature 0: ``best[0]`` is the model's choice at the root, ``best[i + 1]`` at node ``i``."""
        ...

    def sampled(self, tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
        """``p`` [n+1, V]: the processed law at the root and at each node.

        ``sample(law, depth)`` draws with the noise that belongs to a position, ``coin(depth, i)`` is a
        uniform number of that place in this round, which no other round sees.
        """
        ...


class Sampler(Protocol):
    """Draws from a law with the noise that belongs to a position, whoever asks and however often."""

    def __call__(self, law: Tensor, depth: int) -> int:
        """``law`` [V] non-negative, summing to 1; ``depth`` tokens after the root."""
        ...


class Coin(Protocol):
    """Uniform numbers in [0, 1) that belong to a place in a round."""

    def __call__(self, depth: int, i: int) -> float:
        """The ``i``-th coin of the place ``depth`` tokens after the root."""
        ...
