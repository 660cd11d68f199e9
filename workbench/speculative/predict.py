"""Closed forms of speculation: what acceptance, costs and batch size say about speed before anything runs.

Costs are in units of one plain decode step of the target. Leviathan et al. (arXiv 2211.17192, equation 1 and
theorems 3.8 and 3.11) have independent, equal acceptance and a verification that costs one step; here rows
cost what they cost (``verify``), and what a round adds besides is ``overhead``. Predictions, not
measurements: everything drawn from this module is tagged so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.spec.errors import OptionError

VerifyCost = Callable[[float], float]
"""Cost of a target forward of T rows, in units of one of T = 1."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round with a chain of ``gamma`` drafts, each accepted with probability ``alpha``, alone:

    (1 - α^(γ+1)) / (1 - α); γ + 1 for α = 1. Raises :class:`OptionError` outside 0 ≤ α ≤ 1, γ ≥ 0.
    """
    _share("alpha", alpha)
    if gamma < 0:
        raise OptionError(f"gamma = {gamma} is below 0.", hint="Choose 0 or more drafted tokens.")
    return sum(alpha**i for i in range(gamma + 1))


def expected_tokens_of(survival: Sequence[float]) -> float:
    """Tokens of a round whose chain keeps more than i drafts with probability ``survival[i]``: 1 + Σ.

    Exact whatever the positions have to do with each other; the i.i.d. form is survival α, α², …
    """
    for share in survival:
        _share("survival", share)
    return 1.0 + sum(survival)


def expected_tokens_of_tree(parents: Sequence[int], accept: Sequence[float]) -> float:
    """Tokens of a round with a draft tree: 1 + Σ over nodes of the chance that the node is kept.

    ``accept[i]`` is the chance that node i is the one taken, given that its parent was; those of siblings
    add up to at most 1. ``parents`` as in ``DraftTree``.
    """
    kept: list[float] = []
    below: dict[int, float] = {}
    for node, (parent, chance) in enumerate(zip(parents, accept, strict=True)):
        _share("accept", chance)
        if not -1 <= parent < node:
            raise OptionError(f"Node {node} hangs below node {parent}, which is not before it.")
        below[parent] = below.get(parent, 0.0) + chance
        if below[parent] > 1 + 1e-9:
            raise OptionError(f"Children of node {parent} are taken with probability {below[parent]:.3g}.")
        kept.append(chance * (kept[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(kept)


def speedup(tokens: float, gamma: float, verify: float, draft: float, overhead: float = 0.0) -> float:
    """Plain time over drafted time per token: ``tokens`` / (v(γ+1) + γ c + o).

    ``verify`` is v(γ+1), ``draft`` c the cost of one drafted token (of one level, in a tree).
    """
    cost = verify + gamma * draft + overhead
    if cost <= 0:
        raise OptionError("A round costs nothing.", hint="Give the cost of verification, 1 or more.")
    return tokens / cost


def speedup_of_share(share: float, tokens: float, cost: float) -> float:
    """The same where a ``share`` of all steps has a draft, and the others are plain.

    ``cost``: a round's, in plain steps of the same batch; ``tokens``: those that it gains a sequence.
    """
    _share("share", share)
    return (share * tokens + 1 - share) / (share * cost + 1 - share)


def leviathan(alpha: float, gamma: int, draft: float) -> float:
    """Theorem 3.8: verification costs one step, and nothing else is added."""
    return speedup(expected_tokens(alpha, gamma), gamma, 1.0, draft)


def can_pay(alpha: float, draft: float) -> bool:
    """Corollary 3.9: with v = 1 and no overhead some γ gains exactly where α > c."""
    return alpha > draft


def operations(alpha: float, gamma: int, draft: float) -> float:
    """Theorem 3.11: factor by which arithmetic grows; ``draft`` is c by operations, not by time."""
    return (gamma * draft + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(
    alpha: float, verify: VerifyCost, draft: float, overhead: float = 0.0, most: int = 16
) -> tuple[int, float]:
    """The γ ≤ ``most`` of the largest speed-up, and that; (0, 1.0) where drafting does not pay."""
    found = (0, 1.0)
    for gamma in range(1, most + 1):
        gain = speedup(expected_tokens(alpha, gamma), gamma, verify(gamma + 1), draft, overhead)
        if gain > found[1]:
            found = (gamma, gain)
    return found


def parallel(tokens: float, gamma: float, verify: float, draft: float, overhead: float = 0.0) -> float:
    """Speed-up when the next draft is made while the last one is verified, and always fits: the longer one
    counts, ``tokens`` / (max(v, γ c) + o)."""
    return speedup(tokens, 0, max(verify, gamma * draft), 0.0, overhead)


def asynchronous(
    hit: float, on_hit: float, on_miss: float, verify: float, ahead: float, backup: float
) -> float:
    """Speed-up when drafts are made ahead of the verdict and only fit with probability ``hit``.

    A round that finds its draft ready gains ``on_hit`` tokens in max(v, ``ahead``); one that does not gains
    ``on_miss`` in v + ``backup``. By renewal: mean tokens over mean time.
    """
    _share("hit", hit)
    tokens = hit * on_hit + (1 - hit) * on_miss
    return tokens / (hit * max(verify, ahead) + (1 - hit) * (verify + backup))


# -- batches ------------------------------------------------------------------------------------------


def ridge(flops_per_s: float, bytes_per_s: float, bytes_per_weight: float) -> float:
    """Rows T* at which a forward stops being bound by reading weights: F s / (2 BW), attention left out.

    Two operations per weight and row, ``bytes_per_weight`` read once for all rows.
    """
    return flops_per_s * bytes_per_weight / (2 * bytes_per_s)


def roofline(rows: float, ridge_rows: float) -> float:
    """v(T) of a machine that is at its roof on both sides: max(1, T / T*) over its value at one row."""
    return max(1.0, rows / ridge_rows) / max(1.0, 1.0 / ridge_rows)


def crossover(batches: Sequence[float], gains: Sequence[float]) -> float | None:
    """Batch size at which the speed-up first falls to 1, log-linear between the sizes given.

    None while all gain; the first size when not even that gains.
    """
    if not gains or gains[0] <= 1:
        return batches[0] if gains else None
    for i in range(1, len(gains)):
        if gains[i] <= 1:
            share = (gains[i - 1] - 1) / (gains[i - 1] - gains[i])
            low, high = float(batches[i - 1]), float(batches[i])
            return float(low * (high / low) ** share)
    return None


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1 + 1e-12:
        raise OptionError(f"{name} = {value} is no probability.", hint="Choose a value from 0 to 1.")
