"""The seam of KV selection: which cached tokens a sequence keeps.

A selector names its selection points beforehand, sees committed tokens only, and answers with slots; moving
bytes, freeing pages and keeping positions straight is the engine's work (:mod:`workbench.engine.selecting`).
Shape letters: S slots in use, Hq / Hkv query / KV heads, D head size, n new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class CachedLayer:
    """One layer of one sequence's cache: ``keys`` (behind their rotary embedding), ``values`` [Hkv, S, D].

    ``positions`` int64 [Hkv, S]: the absolute position of each slot's token, ascending along S.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


class KVSelector(Protocol):
    """Which cached tokens a sequence keeps, at positions it names beforehand (law 3).

    It acts in KV groups that see all keys; sliding windows forget by themselves. What is kept is compacted
    into private pages that no prefix index names; what is not kept is gone, its pages are free.
    ``history``: how many of the queries before a selection it must have seen: 0 none, None all of them.
    ``per_head``: heads may keep different numbers of tokens; each (layer, KV head) is then a KV group.
    ``rerotates``: kept keys take consecutive positions, and the sequence goes on behind them.
    """

    name: str
    history: int | None
    per_head: bool
    rerotates: bool

    @property
    def key(self) -> str:
        """Names method, version and options."""
        ...

    def next(self, at: int, prompt: int, context: int) -> int | None:
        """The first selection after more than ``at`` committed tokens, or None.

        ``prompt`` tokens were given, ``context`` of them before the question (``prompt`` when not told).
        """
        ...

    def begin(self, prompt: int, context: int) -> Selection:
        """State of a sequence that starts, or starts over."""
        ...


class Selection(Protocol):
    """What a selector knows of one sequence. Calls come in order of positions, for committed tokens only."""

    def observe(
        self, layer: int, queries: Tensor, positions: Tensor, cached: Callable[[], CachedLayer]
    ) -> None:
        """Queries [n, Hq, D] (rotated, scaled) of newly committed tokens at int64 ``positions`` [n].

        ``cached()`` reads the layer's cache, these tokens being its last n slots.
        """
        ...

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        """For each KV head the slots to keep, int64 ascending; all equally many unless ``per_head``.

        Called once per layer in order at a selection; statistics per slot follow the slots kept.
        """
        ...

    def fork(self) -> Selection:
        """A copy for another sample of the same prompt."""
        ...

    def nbytes(self) -> int:
        """Bytes of state held."""
        ...
