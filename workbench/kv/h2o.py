"""H2O: tokens that received most attention so far, and the most recent ones; decided while decoding.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv
2306.14048, NeurIPS 2023), algorithm 1: every token's attention weights are added up over all queries, those
of the prompt included, and when the cache is over its budget the token with the smallest sum goes, unless it
is recent; half of the budget is for recent tokens. With grouped heads, the mean over a KV head's queries.
*Deviation*: cuts come every ``interval`` tokens (1 as in the paper); sinks are protected (0 as in the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.selection import CachedLayer, Selection
from workbench.kv.selection.blocks import Block, QueryBlocks
from workbench.kv.selection.rules import Rules, interval_option, keep_option, protocol_option, sinks_option
from workbench.kv.selection.selector import Selector
from workbench.kv.selection.topk import check_scores, top_slots
from workbench.kv.selection.weights import column_sums
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """What is kept, and how often it is decided."""

    keep: float = keep_option()
    sinks: int = sinks_option()
    recent_share: float = option(
        0.5, low=0.0, high=1.0, step=0.05, unit="of the budget", help="For the most recent tokens."
    )
    protocol: str = protocol_option()
    interval: int = interval_option(16)


SPEC = TechniqueSpec(
    id="h2o",
    title="H2O",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "Adds up the attention every token receives, from the first query on and while text is generated, "
        "and keeps heavy hitters and recent tokens at a fixed number. The sums cost as "
        "much as attention's scores."
    ),
    paper="https://arxiv.org/abs/2306.14048",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("keep=0.75", "", "keep=0.25"),
    claims=(
        Claim(
            "Up to 29x the throughput of DeepSpeed Zero-Inference and Accelerate, 3x that of FlexGen.",
            "OPT-6.7B and OPT-30B, 20% heavy hitters",
            "https://arxiv.org/abs/2306.14048",
        ),
    ),
)


class HeavyHitters:
    """Attention received by each slot, per layer; statistics of committed tokens only."""

    def __init__(self, config: Config, rules: Rules, budget: int) -> None:
        self._config, self._rules, self._budget = config, rules, budget
        self._sums: dict[int, Tensor] = {}  # float64 [Hkv, slots seen]; never changed in place
        self._blocks: dict[int, QueryBlocks] = {}

    def observe(
        self, layer: int, queries: Tensor, positions: Tensor, cached: Callable[[], CachedLayer]
    ) -> None:
        """Add what these queries attend to, once their block has ended."""
        keys: Tensor | None = None
        for block in self._blocks.setdefault(layer, QueryBlocks()).add(queries, positions):
            if keys is None:
                keys = cached().keys
            self._add(layer, block, keys)

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        """Heavy hitters and recent slots; raises :class:`RequestError` for sums that are not finite."""
        for block in self._blocks.setdefault(layer, QueryBlocks()).rest():
            self._add(layer, block, cached.keys)
        heads, slots = cached.positions.shape
        held = self._sums.get(layer, torch.zeros(heads, 0, dtype=torch.float64, device=cached.keys.device))
        sums = _widen(held, slots)
        check_scores(sums, layer, "h2o")
        recent = int(self._config.recent_share * self._budget + 1e-9)
        kept = top_slots(sums, self._budget, self._rules.sinks, recent)
        self._sums[layer] = sums.gather(1, kept)
        return tuple(kept.to(cached.positions.device))

    def _add(self, layer: int, block: Block, keys: Tensor) -> None:
        slots = keys.shape[1] - block.after
        new = column_sums(block.queries, keys[:, :slots])
        old = self._sums.get(layer)
        self._sums[layer] = new if old is None else _widen(old, slots) + new

    def fork(self) -> Selection:
        """A copy with the same sums and waiting queries."""
        other = HeavyHitters(self._config, self._rules, self._budget)
        other._sums = dict(self._sums)
        other._blocks = {layer: blocks.copy() for layer, blocks in self._blocks.items()}
        return other

    def nbytes(self) -> int:
        """Bytes of sums and of queries that wait for their block to end."""
        sums = sum(s.untyped_storage().nbytes() for s in self._sums.values())
        return sums + sum(b.nbytes for b in self._blocks.values())


def _widen(sums: Tensor, slots: int) -> Tensor:
    """Sums [Hkv, s] with zeros for the slots up to ``slots``."""
    return torch.nn.functional.pad(sums, (0, slots - sums.shape[1]))


def bind(config: Config, context: object) -> Selector:
    """The selector; it needs every query, so prompts are never taken from a prefix cache."""
    rules = Rules.of(config, recent=0)
    return Selector("h2o", config, rules, lambda budget: HeavyHitters(config, rules, budget), history=None)
