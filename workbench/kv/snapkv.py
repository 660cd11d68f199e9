"""SnapKV: what the last queries of the context attend to is kept.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469, NeurIPS 2024),
section 4: attention of the last ``recent`` queries over everything before them, softmax over all they see,
averaged over the queries, pooled over ``pool`` neighbours so that a hit keeps its surroundings, and averaged
over the query heads of a KV head; the window itself is always kept. The paper has no sinks (``sinks=0``): its
scores find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from workbench.engine.selection import CachedLayer, Selection
from workbench.kv.selection.rules import KeepOptions, Rules
from workbench.kv.selection.selector import Selector
from workbench.kv.selection.topk import check_scores, top_slots
from workbench.kv.selection.weights import column_sums
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config(KeepOptions):
    """What is kept, and when."""

    recent: int = option(
        64,
        low=1,
        high=1024,
        unit="tokens",
        help="The window: last tokens of the context, whose queries vote and which are kept themselves.",
    )
    pool: int = option(
        5,
        choices=(1, 3, 5, 7, 9, 13),
        unit="tokens",
        help="Neighbours that scores are averaged over; 1: none.",
    )


SPEC = TechniqueSpec(
    id="snapkv",
    title="SnapKV",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "Keeps, per KV head, the tokens that the last queries of the context attend to, with their "
        "neighbours, and those last tokens themselves. Strong when the question has been seen (protocol "
        "aware); agnostic, it guesses from how the context ends."
    ),
    paper="https://arxiv.org/abs/2404.14469",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("keep=0.75", "", "keep=0.25"),
    claims=(
        Claim(
            "3.6x faster generation and 8.2x less memory.",
            "inputs of 16K tokens, against the same model without it",
            "https://arxiv.org/abs/2404.14469",
        ),
        Claim(
            "LongBench average 45.3 at 30% eviction and 33.7 at 90% (full cache 45.7).",
            "LLaMA-3.1-8B, as measured in the CurDKV paper",
            "https://arxiv.org/abs/2509.15038",
        ),
    ),
)


def snap_scores(queries: Tensor, keys: Tensor, pool: int) -> Tensor:
    """Scores float64 [Hkv, S]: queries [n, Hq, D] of the last n slots over ``keys`` [Hkv, S, D].

    The slots of the queries themselves score zero; they are kept as recent tokens.
    """
    n, slots = len(queries), keys.shape[1]
    before = column_sums(queries, keys)[:, : slots - n] / max(n, 1)
    if before.shape[1] and pool > 1:
        before = avg_pool1d(before[None], pool, stride=1, padding=pool // 2)[0]
    return torch.nn.functional.pad(before, (0, n))


class WindowSelection:
    """The last queries of each layer; they are scored at the selection, so chunks cannot matter."""

    def __init__(self, config: Config, rules: Rules, budget: int) -> None:
        self._config, self._rules, self._budget = config, rules, budget
        self._queries: dict[int, Tensor] = {}  # never changed in place: copies share them

    def observe(
        self, layer: int, queries: Tensor, positions: Tensor, cached: Callable[[], CachedLayer]
    ) -> None:
        """Hold on to the last ``recent`` queries."""
        window = self._config.recent
        held = self._queries.get(layer, queries[:0])
        self._queries[layer] = torch.cat((held, queries[-window:]))[-window:].clone()

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        """The window and the best slots before it; raises :class:`RequestError` for scores not finite."""
        queries = self._queries.pop(layer, None)
        slots = cached.positions.shape[1]
        if queries is None:  # nothing newly committed: positions alone decide
            queries = cached.keys.new_zeros((0, len(cached.keys), cached.keys.shape[-1]))
        scores = snap_scores(queries[-slots:], cached.keys, self._config.pool)
        check_scores(scores, layer, "snapkv")
        kept = top_slots(scores, self._budget, self._rules.sinks, self._config.recent)
        return tuple(kept.to(cached.positions.device))

    def fork(self) -> Selection:
        """A copy with the same queries."""
        other = WindowSelection(self._config, self._rules, self._budget)
        other._queries = dict(self._queries)
        return other

    def nbytes(self) -> int:
        """Bytes of the queries held."""
        return sum(q.untyped_storage().nbytes() for q in self._queries.values())


def bind(config: Config, context: Any) -> Selector:
    """The selector; it must have seen the queries of its window."""
    rules = Rules.of(config)
    return Selector(
        "snapkv",
        config,
        rules,
        lambda budget: WindowSelection(config, rules, budget),
        history=config.recent,
    )
