"""Where two runs of the same prompt part, and whether their numerics class allows it.

Exact recipes in the *pinned* class must agree token by token. In the *fast* class they may part only where
the reference's top-two margin is below twice the noise of the two paths; that noise is measured on the
tokens they share, as the largest difference of the log-probabilities both gave to the same token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.spec.run import Run


@dataclass(frozen=True)
class Divergence:
    """Outputs ``index`` of two runs; ``at`` is the first output token that differs, None if none does.

    ``margin`` is the reference's top-two gap there, ``noise`` the largest log-probability difference over
    the ``shared`` tokens before it (both nats, None when log-probabilities were not recorded).
    ``allowed`` is None when nothing can be said.
    """

    index: int
    shared: int
    at: int | None
    a: int | None
    b: int | None
    margin: float | None
    noise: float | None
    allowed: bool | None
    words: str


def divergences(a: Run, b: Run) -> tuple[Divergence, ...]:
    """One per pair of outputs with the same prompt and sample number."""
    theirs = {_key(o): o for o in b.outputs}
    pairs = [(i, o, theirs[_key(o)]) for i, o in enumerate(a.outputs) if _key(o) in theirs]
    return tuple(_compare(i, x, y, a, b) for i, x, y in pairs)


def _key(output: Mapping[str, Any]) -> tuple[str, int]:
    return str(output.get("prompt", "")), int(output.get("sample", 0))


def _compare(index: int, x: Mapping[str, Any], y: Mapping[str, Any], a: Run, b: Run) -> Divergence:
    left, right = list(x.get("token_ids", ())), list(y.get("token_ids", ()))
    n = next(
        (i for i, (p, q) in enumerate(zip(left, right, strict=False)) if p != q), min(len(left), len(right))
    )
    noise = _noise(x, y, n)
    if n == len(left) == len(right):
        return Divergence(index, n, None, None, None, None, noise, True, f"all {n} tokens are the same")
    if n in (len(left), len(right)):
        longer = "first" if len(left) > len(right) else "second"
        words = f"the first {n} tokens are the same; the {longer} run is longer"
        return Divergence(index, n, None, None, None, None, noise, None, words)
    margin = _margin(x, n)
    allowed, why = _judge(a, b, x, y, margin, noise, n)
    words = f"tokens part at {n} (id {left[n]} against {right[n]}): {why}"
    return Divergence(index, n, n, left[n], right[n], margin, noise, allowed, words)


def _judge(
    a: Run,
    b: Run,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    margin: float | None,
    noise: float | None,
    n: int,
) -> tuple[bool | None, str]:
    kinds = (a.plan.get("kind"), b.plan.get("kind"))
    if any(k not in (None, "exact") for k in kinds):
        return None, "a lossy or simulated recipe may say something else"
    if a.weight_hash != b.weight_hash or a.dtype != b.dtype:
        return None, "weights or dtype differ"
    if not (_greedy(x) and _greedy(y)) and a.seed != b.seed:
        return None, "sampled with different seeds"
    if a.numerics == b.numerics == "pinned":
        return False, "pinned runs of exact recipes must be identical; this is a defect"
    if margin is None or noise is None:
        return None, "run with logprobs=2 to judge it by the margin rule"
    rule = f"margin {margin:.3g} nats, twice the noise measured on {n} shared tokens {2 * noise:.3g} nats"
    if margin <= 2 * noise:
        return True, f"{rule}: within the fast class"
    return False, f"{rule}: more than numerics explain"


def _greedy(output: Mapping[str, Any]) -> bool:
    sampling = output.get("sampling")
    return isinstance(sampling, Mapping) and float(sampling.get("temperature", 0.0)) == 0.0


def _margin(output: Mapping[str, Any], at: int) -> float | None:
    tokens = output.get("tokens") or ()
    top = (
        sorted((p for _, p in tokens[at].get("top_logprobs") or ()), reverse=True) if at < len(tokens) else []
    )
    return float(top[0] - top[1]) if len(top) >= 2 else None


def _noise(x: Mapping[str, Any], y: Mapping[str, Any], n: int) -> float | None:
    pairs = zip((x.get("tokens") or ())[:n], (y.get("tokens") or ())[:n], strict=False)
    found = [
        abs(p["logprob"] - q["logprob"])
        for p, q in pairs
        if p.get("logprob") is not None and q.get("logprob") is not None
    ]
    return max(found) if found else None
