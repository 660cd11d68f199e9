"""Which slots are kept, given scores: exact numbers, protected ends, ties by age.

Sinks come first (a model without them breaks), but never all of the budget: the last token is kept as well
wherever recent tokens are protected. Recent tokens come second, newest first, then scores. Equal scores keep
the older token, so that a selection never depends on how a sort orders equals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.spec.errors import InvariantError, RequestError


def check_scores(scores: Tensor, layer: int, method: str) -> None:
    """Raises :class:`RequestError` naming the layer when scores [Hkv, S] are not all finite."""
    if not bool(torch.isfinite(scores).all()):
        raise RequestError(
            f"{method} found values that are not finite in the KV cache of layer {layer}.",
            hint="The model produced them before selection: check the weights and the dtype.",
        )


def protected(slots: int, keep: int, sinks: int, recent: int) -> tuple[int, int]:
    """How many first and last slots are kept whatever their score; together at most ``keep``."""
    first = min(sinks, keep - 1, slots)
    last = min(recent, keep - first, slots - first)
    return first, last


def top_slots(scores: Tensor, keep: int, sinks: int, recent: int) -> Tensor:
    """Slots kept of ``scores`` [Hkv, S]: int64 [Hkv, min(keep, S)], ascending; ``keep`` is at least 1."""
    heads, slots = scores.shape
    if keep < 1:
        raise InvariantError(f"A selection was asked to keep {keep} tokens.")
    every = torch.arange(slots, device=scores.device)
    if keep >= slots:
        return every.expand(heads, slots)
    first, last = protected(slots, keep, sinks, recent)
    middle = scores[:, first : slots - last]
    best = middle.sort(dim=1, descending=True, stable=True).indices[:, : keep - first - last]
    parts = (every[:first].expand(heads, -1), best.sort(1).values + first)
    return torch.cat((*parts, every[slots - last :].expand(heads, -1)), 1)


def top_slots_per_head(
    scores: Tensor, keep: int, sinks: int, recent: int, safeguard: float
) -> tuple[Tensor, ...]:
    """One budget of ``keep`` x Hkv tokens shared by the heads, ranked by ``scores`` [Hkv, S].

    Each head first gets its protected slots and its best, ``safeguard`` of ``keep`` and at least one in all;
    what is left goes to the best of all heads (Ada-KV, arXiv 2407.11550, algorithm 1). Returns int64
    ascending, per head.
    """
    heads, slots = scores.shape
    every = torch.arange(slots, device=scores.device)
    if keep >= slots:
        return (every,) * heads
    first, last = protected(slots, keep, sinks, recent)
    own = max(int(safeguard * keep + 1e-9), first + last, 1)  # a head without any could attend to nothing
    order = scores[:, first : slots - last].sort(dim=1, descending=True, stable=True)
    # Ranked together, safe ones ahead of all: an own sort key would have to beat every finite score.
    safe = own - first - last
    rest, where = order.values[:, safe:], order.indices[:, safe:]
    taken = rest.flatten().sort(descending=True, stable=True).indices[: (keep - own) * heads]
    share = torch.bincount(taken // max(rest.shape[1], 1), minlength=heads).tolist()
    return tuple(
        torch.cat(
            (
                every[:first],
                torch.cat((order.indices[h, :safe], where[h, : share[h]])).sort().values + first,
                every[slots - last :],
            )
        )
        for h in range(heads)
    )
