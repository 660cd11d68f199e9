"""AdaCurDKV: CurDKV with one budget per layer that its heads share unequally.

arXiv 2509.15038, after Ada-KV (arXiv 2407.11550): the tokens of all KV heads of a layer are ranked together,
by their normalised scores, and each head is sure of ``safeguard`` of an equal share. Heads then keep
different numbers of tokens, so each has pages of its own; no row is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from workbench.engine.selection import CachedLayer
from workbench.kv.curdkv import ScoreOptions, scorer
from workbench.kv.selection.rules import KeepOptions, Rules
from workbench.kv.selection.selector import CacheOnly, Selector
from workbench.kv.selection.topk import check_scores, top_slots_per_head
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class ShareOptions(KeepOptions):
    """What is kept, and what every head is sure of."""

    safeguard: float = option(
        0.2, low=0.0, high=1.0, step=0.05, help="Share of an equal budget that every head keeps."
    )


@dataclass(frozen=True)
class Config(ScoreOptions, ShareOptions):
    """What is kept, what every head is sure of, and by which score the rest is shared out."""


SPEC = TechniqueSpec(
    id="adacurdkv",
    title="AdaCurDKV",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "CurDKV with a budget per layer: heads whose scores are concentrated keep fewer tokens, others more. "
        "Every head has its own pages, so what is saved is real and what is padded is shown."
    ),
    paper="https://arxiv.org/abs/2509.15038",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("", "recent=64", "keep=0.25,recent=64"),
    claims=(
        Claim(
            "LongBench average 49.1 at 30% eviction and 35.1 at 90% (full cache 45.7).",
            "LLaMA-3.1-8B; better than the full cache, so the harness may favour it",
            "https://arxiv.org/abs/2509.15038",
        ),
    ),
)


@dataclass(frozen=True)
class SharedBudget(CacheOnly):
    """A selection from keys and values with a budget per layer."""

    safeguard: float

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        """Slots of each head, ``budget`` times the heads in all; :class:`RequestError` if not finite."""
        scores = self.score(layer, cached)
        check_scores(scores, layer, self.method)
        kept = top_slots_per_head(scores, self.budget, self.rules.sinks, self.rules.recent, self.safeguard)
        return tuple(slots.to(cached.positions.device) for slots in kept)


def bind(config: Config, context: object) -> Selector:
    """The selector; every KV head of a layer becomes a KV group."""
    rules, score = Rules.of(config), scorer(config)
    return Selector(
        "adacurdkv",
        config,
        rules,
        lambda budget: SharedBudget("adacurdkv", rules, budget, score, config.safeguard),
        per_head=True,
    )
