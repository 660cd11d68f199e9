"""Expected attention: tokens that future queries are expected to attend to, weighted by their values.

Devoto, Jeblick, Jégou, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution" (arXiv 2510.00636): queries before RoPE are taken as Gaussian; with mean and covariance turned
by the average rotation of the next positions, E[exp(q.k)] = exp(k.mu + k'Sk/2) for a key k. A token's score
is that, normalised over the tokens, averaged over a KV head's queries, times the norm of its value. The first
tokens are outliers: left out of the statistics and the scores, and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.selection import CachedLayer, Selection
from workbench.kv.selection.blocks import Block, QueryBlocks
from workbench.kv.selection.exact import widened
from workbench.kv.selection.rules import KeepOptions, Rules
from workbench.kv.selection.selector import Selector
from workbench.kv.selection.topk import check_scores, top_slots
from workbench.kv.selection.unrotate import Rotation
from workbench.models.rope import apply_rope
from workbench.spec.technique import TechniqueSpec, option


@dataclass(frozen=True)
class Config(KeepOptions):
    """What is kept, and how the future is imagined."""

    future: int = option(
        512, low=1, high=65536, unit="tokens", help="Positions to come whose rotations are averaged."
    )
    covariance: bool = option(True, help="Let queries vary; off, only their mean counts.")
    epsilon: float = option(
        0.0, low=0.0, high=1.0, help="Added to every expected weight before the value's norm multiplies it."
    )


SPEC = TechniqueSpec(
    id="expected_attention",
    title="Expected attention",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "Imagines the next queries as a Gaussian fitted to those seen, and keeps, per KV head, the tokens "
        "they would attend to, weighted by the norm of the value. Needs all queries of the context, never a "
        "matrix of tokens by tokens."
    ),
    paper="https://arxiv.org/abs/2510.00636",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("keep=0.75", "", "keep=0.25"),
)


@dataclass(frozen=True)
class Moments:
    """Count, sum float64 [Hq, D] and sum of products float64 [Hq, D, D] of queries before RoPE."""

    count: int
    total: Tensor
    products: Tensor

    def plus(self, queries: Tensor) -> Moments:
        """With float64 queries [n, Hq, D] added."""
        q = queries.transpose(0, 1)
        return Moments(
            self.count + len(queries), self.total + q.sum(1), self.products + q.transpose(1, 2) @ q
        )

    def mean(self) -> Tensor:
        """Mean [Hq, D]."""
        return self.total / max(self.count, 1)

    def covariance(self) -> Tensor:
        """Covariance [Hq, D, D], divided by the count."""
        mean = self.mean()
        return self.products / max(self.count, 1) - mean[:, :, None] * mean[:, None, :]


def expected_scores(
    keys: Tensor, values: Tensor, mean: Tensor, covariance: Tensor | None, epsilon: float
) -> Tensor:
    """Scores [Hkv, S] of keys and values [Hkv, S, D], in float32 (float64 for float64 keys).

    ``mean`` [Hq, D] and ``covariance`` [Hq, D, D] are those of rotated, scaled queries (float64).
    """
    kv_heads, _, dim = keys.shape
    group = len(mean) // kv_heads
    k = widened(keys)
    logits = mean.to(k.dtype).view(kv_heads, group, dim) @ k.transpose(1, 2)
    if covariance is not None:
        spread = covariance.to(k.dtype).view(kv_heads, group, dim, dim)
        logits = logits + ((k[:, None] @ spread) * k[:, None]).sum(-1) / 2
    out: Tensor = (logits.softmax(-1).mean(1) + epsilon) * widened(values).norm(dim=-1)
    return out


def ahead(
    mean: Tensor, covariance: Tensor | None, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Mean and covariance behind the average rotation ``turn``: R mu and R S R'."""
    turned = apply_rope(mean, *turn)
    if covariance is None:
        return turned, None
    half = apply_rope(covariance, *turn)
    return turned, apply_rope(half.transpose(1, 2), *turn)


class ExpectedSelection:
    """Moments of each layer's queries; sinks left out."""

    def __init__(self, config: Config, rules: Rules, rotation: Rotation, budget: int) -> None:
        self._config, self._rules, self._rotation, self._budget = config, rules, rotation, budget
        self._moments: dict[int, Moments] = {}
        self._blocks: dict[int, QueryBlocks] = {}

    def observe(
        self, layer: int, queries: Tensor, positions: Tensor, cached: Callable[[], CachedLayer]
    ) -> None:
        """Add the queries to the layer's moments, once their block has ended."""
        for block in self._blocks.setdefault(layer, QueryBlocks()).add(queries, positions):
            self._add(layer, block)

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        """The slots expected to matter; raises :class:`RequestError` for scores that are not finite."""
        for block in self._blocks.setdefault(layer, QueryBlocks()).rest():
            self._add(layer, block)
        heads, slots = cached.positions.shape
        sinks = min(self._rules.sinks, slots)
        scores = torch.zeros(heads, slots, dtype=torch.float64, device=cached.keys.device)
        moments = self._moments.pop(layer, None)
        if moments is not None and sinks < slots:
            start = int(cached.positions[:, -1].max()) + 1
            turn = tuple(t.to(scores.device) for t in self._rotation.ahead(start, self._config.future))
            covariance = moments.covariance() if self._config.covariance else None
            mean, covariance = ahead(moments.mean(), covariance, (turn[0], turn[1]))
            scores[:, sinks:] = expected_scores(
                cached.keys[:, sinks:], cached.values[:, sinks:], mean, covariance, self._config.epsilon
            )
        check_scores(scores, layer, "expected_attention")
        kept = top_slots(scores, self._budget, self._rules.sinks, self._rules.recent)
        return tuple(kept.to(cached.positions.device))

    def _add(self, layer: int, block: Block) -> None:
        past = int((block.positions < self._rules.sinks).sum())
        plain = self._rotation.undo(block.queries[past:], block.positions[past:])
        if len(plain):
            heads, dim = plain.shape[1:]
            empty = Moments(0, plain.new_zeros(heads, dim), plain.new_zeros(heads, dim, dim))
            self._moments[layer] = self._moments.get(layer, empty).plus(plain)

    def fork(self) -> Selection:
        """A copy with the same moments and waiting queries."""
        other = ExpectedSelection(self._config, self._rules, self._rotation, self._budget)
        other._moments = dict(self._moments)
        other._blocks = {layer: blocks.copy() for layer, blocks in self._blocks.items()}
        return other

    def nbytes(self) -> int:
        """Bytes of the moments and of queries that wait for their block to end."""
        held = [t for m in self._moments.values() for t in (m.total, m.products)]
        return sum(t.untyped_storage().nbytes() for t in held) + sum(b.nbytes for b in self._blocks.values())


def bind(config: Config, context: Any) -> Selector:
    """The selector, with the rotations of ``context.config``; it needs every query of the context."""
    rules, rotation = Rules.of(config), Rotation(context.config)
    return Selector(
        "expected_attention",
        config,
        rules,
        lambda budget: ExpectedSelection(config, rules, rotation, budget),
        history=None,
    )
