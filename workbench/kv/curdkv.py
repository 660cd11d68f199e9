"""CurDKV: rows of K and V that carry their matrices, found without attention.

Sengupta, Chaudhary, Chakraborty, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition"
(arXiv 2509.15038, NeurIPS 2025), algorithm 1: per layer and KV head, keys and values are projected by one
Gaussian matrix to r dimensions, the squared row norms of both are multiplied, and the best rows are kept with
their original positions. The paper calls the projected norms leverage scores; true leverage is an option,
to compare. Question-agnostic by nature: it never sees a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.engine.selection import CachedLayer
from workbench.kv.selection.leverage import (
    leverage_scores,
    normalised,
    projected_norms,
    projection,
    row_norms,
)
from workbench.kv.selection.rules import KeepOptions, Rules
from workbench.kv.selection.selector import Score, Selector, cache_only
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class ScoreOptions:
    """How rows of K and V are scored."""

    score: str = option(
        "product",
        choices=("product", "value", "key"),
        help="Which rows count: of values, of keys, or both, multiplied.",
    )
    form: str = option(
        "projected",
        choices=("projected", "rows", "leverage"),
        help="projected: squared norms of randomly projected rows, as in the paper. rows: exact norms. "
        "leverage: true leverage scores from a thin SVD.",
    )
    rank: int = option(20, low=1, high=256, help="Dimensions that projected rows have.")
    local: int = option(
        0,
        low=0,
        high=1024,
        unit="tokens",
        help="Normalise norms of keys and of values within windows of so many tokens, so that no stretch of "
        "text is emptied (16 in the public implementation); 0 normalises over all tokens.",
    )
    seed: int = option(0, low=0, high=2**31 - 1, help="Seed of the projection; each layer has its own.")


@dataclass(frozen=True)
class Config(ScoreOptions, KeepOptions):
    """What is kept, and by which score."""


SPEC = TechniqueSpec(
    id="curdkv",
    title="CurDKV",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "Keeps the tokens whose projected key and value rows are longest, per KV head. Needs no queries and "
        "no attention, so it works with any attention kernel. On small models continuing plain text it is "
        "not clearly better than chance; recent tokens matter more (option recent)."
    ),
    paper="https://arxiv.org/abs/2509.15038",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("", "recent=64", "score=value,recent=64", "keep=0.25,score=value,recent=64"),
    claims=(
        Claim(
            "LongBench average 48.9 at 30% eviction and 35.7 at 90% (full cache 45.7; SnapKV 45.3 and 33.7).",
            "LLaMA-3.1-8B; better than the full cache, so the harness may favour it",
            "https://arxiv.org/abs/2509.15038",
        ),
        Claim(
            "RULER needle-in-a-haystack 98.7 at 30% eviction (SnapKV 80.4).",
            "LLaMA-3.1-8B, 16K; Mistral-7B: 77.8 against 37.4",
            "https://arxiv.org/abs/2509.15038",
        ),
    ),
)


def cur_scores(
    keys: Tensor, values: Tensor, norms: Callable[[Tensor], Tensor], which: str, local: int = 0
) -> Tensor:
    """Scores [Hkv, S] of rows [Hkv, S, D], each head's sum 1: ``norms`` of values, keys, or both multiplied.

    ``local``: norms are shares of windows of so many slots, each side of its own, before they are multiplied.
    """
    # Shares before the product too: products of squared norms of many channels can leave float32.
    sides = [
        normalised(norms(x), local) for x in {"key": (keys,), "value": (values,)}.get(which, (keys, values))
    ]
    return normalised(sides[0] if len(sides) == 1 else sides[0] * sides[1])


def scorer(config: ScoreOptions) -> Score:
    """The score function that the options describe."""

    def score(layer: int, cached: CachedLayer) -> Tensor:
        norms: Callable[[Tensor], Tensor] = {"rows": row_norms, "leverage": leverage_scores}.get(
            config.form
        ) or (lambda x: projected_norms(x, matrix))
        matrix = projection(cached.keys.shape[-1], config.rank, config.seed, layer)
        return cur_scores(cached.keys, cached.values, norms, config.score, config.local)

    return score


def bind(config: Config, context: object) -> Selector:
    """The selector."""
    return cache_only("curdkv", config, Rules.of(config), scorer(config))
