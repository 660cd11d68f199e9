"""From logged texts to a way of drafting: the best fixed choice, a Q-network that beats it, or not.

Prompts are split three ways: the network learns from some, others decide which exits it looks at and whether
it is used at all, and the last say what it is worth. The price of a pass in the reward is what the best fixed
choice earns with one: a round that earns less is not worth its time (Dinkelbach's method for a ratio).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.speculative.lede.choice import Guard, best_static, fared
from workbench.speculative.lede.learnt import Way
from workbench.speculative.lede.q_learning import Learning, Values, greedy, learn
from workbench.speculative.lede.replay import Replay
from workbench.speculative.lede.rounds import Costs, Policy, Round, rate, static
from workbench.speculative.lede.state import Limits
from workbench.speculative.lede.walks import Place, explored, walk

Text = Sequence[Place]
T = TypeVar("T")
_FRESH = 0.7  # share of recent drafts accepted, before there are any


@dataclass(frozen=True)
class Fitting:
    """``times``: walks of chance over each text that is learnt from; every ``judged``-th prompt judges, every
    ``chosen``-th of the others chooses."""

    learning: Learning = field(default_factory=lambda: Learning(steps=3000, batch=128))
    times: int = 12
    judged: int = 4
    chosen: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """A way of drafting, what it earns on text that judged it, and the losses of its training."""

    way: Way
    costs: Costs
    facts: dict[str, Any]
    curve: list[dict[str, float]]


def split(texts: Sequence[T], fitting: Fitting) -> tuple[list[T], list[T], list[T]]:
    """Texts (or prompts) to learn from, to choose by and to judge by; a prompt's text is never divided."""
    judging = list(texts[fitting.judged - 1 :: fitting.judged])
    rest = [t for i, t in enumerate(texts) if i % fitting.judged != fitting.judged - 1]
    choosing = rest[fitting.chosen - 1 :: fitting.chosen]
    return [t for i, t in enumerate(rest) if i % fitting.chosen != fitting.chosen - 1], choosing, judging


def rounds_of(
    texts: Sequence[Text], policy: Policy, limits: Limits, costs: Costs, recent: float = _FRESH
) -> list[Round]:
    """A policy's rounds over texts."""
    return [r for text in texts for r in walk(text, policy, limits, costs, recent)]


def fit(
    texts: Sequence[Text],
    limits: Limits,
    costs: Costs,
    fitting: Fitting,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Fitted:
    """Learn, choose and judge."""
    learning, choosing, judging = split(texts, fitting)

    def played(policy: Policy, alone: Limits) -> list[Round]:
        return rounds_of([*learning, *choosing], policy, alone, costs)

    exit, drafts, earned = best_static(played, limits)
    fixed = static(exit, drafts)
    alone = Limits(limits.layers, limits.longest, (exit,)) if exit else limits
    fixed_rounds = rounds_of(choosing, fixed, alone, costs) if exit else []
    recent = fared(fixed_rounds)[0] if exit else _FRESH
    costs = replace(costs, price=max(1.0, earned))
    tried: list[tuple[float, Limits, Values, list[dict[str, float]]]] = []
    for first in range(len(limits.exits)):
        check_cancel(cancel, "Learning exits")
        report(
            progress, first / len(limits.exits), f"learning with exits from layer {limits.exits[first]} on"
        )
        seen = Limits(limits.layers, limits.longest, limits.exits[first:])
        values, curve = _learnt(learning, seen, costs, fitting, recent)
        value = rate(rounds_of(choosing, greedy(values, seen), seen, costs, recent))
        tried.append((value, seen, values, curve))
    value, seen, values, curve = max(tried, key=lambda t: t[0])
    own = rounds_of(choosing, greedy(values, seen), seen, costs, recent)
    used = value > (rate(fixed_rounds) if exit else 1.0)
    guard = Guard(fared(own), fared(fixed_rounds) if exit else fared(own))
    way = Way(values, seen, (exit, drafts), used, guard)
    return Fitted(way, costs, judged(way, judging, costs), curve)


def judged(way: Way, texts: Sequence[Text], costs: Costs) -> dict[str, Any]:
    """What a way earns on texts: of the network, of the fixed choice, of what is used, in tokens per pass."""
    recent = way.guard.learnt[0]  # as in the engine
    learnt = rounds_of(texts, greedy(way.values, way.limits), way.limits, costs, recent)
    exit, drafts = way.fixed
    alone = Limits(way.limits.layers, way.limits.longest, (exit,)) if exit else way.limits
    fixed = rounds_of(texts, static(exit, drafts), alone, costs, recent) if exit else []
    found = {"learnt": _facts(learnt), "fixed": _facts(fixed) if exit else {"rate": 1.0}}
    found["used"] = found["learnt" if way.learnt else "fixed"]
    return {**found, "exit": exit, "drafts": drafts, "price": round(costs.price, 4), "texts": len(texts)}


def _facts(rounds: list[Round]) -> dict[str, Any]:
    drafted = [r for r in rounds if r.drafted]
    return {
        "rate": round(rate(rounds), 4),
        "reward": round(sum(r.reward for r in rounds) / len(rounds), 4),
        "rounds": len(rounds),
        "tokens": sum(r.tokens for r in rounds),
        "accepted": round(sum(r.accepted for r in rounds) / max(1, sum(r.drafted for r in rounds)), 4),
        "mean_exit": round(sum(r.exit for r in drafted) / max(1, len(drafted)), 3),
        "mean_drafts": round(sum(r.drafted for r in rounds) / len(rounds), 3),
        "exits": {str(e): sum(r.exit == e for r in rounds) for e in sorted({r.exit for r in rounds})},
    }


def _learnt(
    texts: Sequence[Text], limits: Limits, costs: Costs, fitting: Fitting, recent: float
) -> tuple[Values, list[dict[str, float]]]:
    rounds = explored(texts, limits, costs, recent, fitting.times, fitting.seed)
    curve: list[dict[str, float]] = []
    every = max(1, fitting.learning.steps // 20)
    losses: list[float] = []

    def kept(step: int, loss: float) -> None:
        losses.append(loss)
        if len(losses) == every:
            curve.append({"step": step + 1, "loss": round(sum(losses) / every, 5)})
            losses.clear()

    network = learn(Replay.of(rounds, limits), fitting.learning, kept)
    return network.values(), curve
