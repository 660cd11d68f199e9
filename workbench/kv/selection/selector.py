"""A selector as data: its rules, what it must have seen, and how a sequence's state begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.engine.selection import CachedLayer, Selection
from workbench.kv.selection.rules import Rules
from workbench.kv.selection.topk import check_scores, top_slots

Score = Callable[[int, CachedLayer], Tensor]
"""Scores [Hkv, S] of a layer's cached tokens, higher is kept; a pure function."""


@dataclass
class Selector:
    """:class:`workbench.engine.selection.KVSelector` of a technique; ``start`` makes state for a budget."""

    name: str
    config: Any
    rules: Rules
    start: Callable[[int], Selection]
    history: int | None = 0
    per_head: bool = False
    rerotates: bool = False
    version: int = 1

    @property
    def key(self) -> str:
        """Name, version and every option."""
        options = dataclasses.asdict(self.config)
        return "/".join((self.name, str(self.version), *(f"{k}={v!r}" for k, v in options.items())))

    def next(self, at: int, prompt: int, context: int) -> int | None:
        """The first selection after more than ``at`` committed tokens, or None."""
        return self.rules.next(at, prompt, context)

    def begin(self, prompt: int, context: int) -> Selection:
        """State of a sequence that starts, or starts over."""
        return self.start(self.rules.budget(prompt, context))


@dataclass(frozen=True)
class CacheOnly:
    """A selection by keys, values and positions alone: nothing is observed, so there is no state."""

    method: str
    rules: Rules
    budget: int
    score: Score

    def observe(
        self, layer: int, queries: Tensor, positions: Tensor, cached: Callable[[], CachedLayer]
    ) -> None:
        """Queries do not matter here."""

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        """The best ``budget`` slots of each head; raises :class:`RequestError` for scores not finite."""
        scores = self.score(layer, cached)
        check_scores(scores, layer, self.method)
        kept = top_slots(scores, self.budget, self.rules.sinks, self.rules.recent)
        return tuple(kept.to(cached.positions.device))

    def fork(self) -> Selection:
        """Itself: nothing to copy."""
        return self

    def nbytes(self) -> int:
        """No state."""
        return 0


def cache_only(name: str, config: Any, rules: Rules, score: Score, *, rerotates: bool = False) -> Selector:
    """A selector of equally many slots per head that needs no queries."""
    return Selector(
        name, config, rules, lambda budget: CacheOnly(name, rules, budget, score), rerotates=rerotates
    )
