"""The record of a run as plain data, and what numbers say against ceilings, goals and baselines.

A record is JSON: settings, device, ceilings, one row per case with its state, relations between cases. States
of a row: ``waiting``, ``passed``, ``measured``, ``failed`` (wrong numbers), ``hung``, ``error``, ``skipped``
(with the reason), ``not reached``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.kernels.bench import roofline
from workbench.kernels.bench.case import Case, Relation
from workbench.kernels.bench.roofline import Ceilings

Row = dict[str, Any]
SCHEMA = 1
BAD = ("failed", "hung", "error")


def row_of(case: Case) -> Row:
    """A case that waits."""
    claimed = roofline.floor(case.cost, case.unit, roofline.CLAIMED)
    return {
        "key": case.key,
        "kernel": case.kernel,
        "name": case.name,
        "timed": case.timed,
        "unit": case.unit,
        "flops": case.cost.flops,
        "bytes": case.cost.bytes,
        "bound": "bytes" if claimed.by_bytes else "operations",
        "claimed_floor": claimed.seconds,
        "variants": list(case.variants),
        "goals": [_goal_row(g) for g in case.goals],
        "state": "waiting",
        "reason": "",
    }


def ceilings_of(measured: Mapping[str, Mapping[str, Any]]) -> Ceilings:
    """Ceilings from what a child measured; those it could not measure are not known."""
    return Ceilings({name: float(c.get("rate", 0.0)) for name, c in measured.items()}, measured=True)


def with_check(row: Row, parts: Mapping[str, Any]) -> Row:
    """The row of a check that ran to its end, passed or failed."""
    wrong = {name: v["wrong"] for name, v in parts["outputs"].items() if v["wrong"]}
    reason = "; ".join(f"{name}: {why}" for name, why in wrong.items())
    state = "passed" if parts["passed"] else "failed"
    figures = parts.get("figures", {})
    goals = [_reached(g, figures.get(g["of"])) for g in row["goals"]]
    return {**row, "state": state, "reason": reason, "check": dict(parts), "goals": goals}


def with_times(row: Row, parts: Mapping[str, Any], case: Case, ceilings: Ceilings, disagree: float) -> Row:
    """The row of a timed case from what arrived of it; ``failed`` when a baseline's numbers differ."""
    seconds = parts["ours"]["median"]
    rate, unit = roofline.rate(case.cost, case.unit, seconds)
    bound = roofline.floor(case.cost, case.unit, ceilings)
    baselines = {name: _beside(b, seconds) for name, b in parts.get("baselines", {}).items()}
    variants = {name: _beside(v, seconds) for name, v in parts.get("variants", {}).items()}
    values = {name: b.get("times_faster") for name, b in baselines.items()} | {"": rate}
    differing = {n: b["differs"] for n, b in baselines.items() if (b.get("differs") or 0.0) > disagree}
    reason = "; ".join(f"differs from {n} by {d:.2g}" for n, d in differing.items())
    return {
        **row,
        "state": "failed" if differing else "measured",
        "reason": reason,
        "seconds": seconds,
        "rate": rate,
        "rate_unit": unit,
        "floor": bound.seconds or None,
        "fraction": roofline.fraction(bound, seconds),
        "ours": dict(parts["ours"]),
        "call": parts.get("call"),
        "sets": parts.get("sets"),
        "baselines": baselines,
        "variants": variants,
        "goals": [_reached(g, values.get(g["of"])) for g in row["goals"]],
    }


def relation_row(relation: Relation, kernel: str, rows: Sequence[Row]) -> Row:
    """How much faster the first of two cases was; ``value`` is None when one was not measured."""
    seconds = {r["name"]: r.get("seconds") for r in rows if r["kernel"] == kernel}
    first, second = seconds.get(relation.first), seconds.get(relation.second)
    value = relation.scale * second / first if first and second else None
    goal = [_reached(_goal_row(relation.goal), value)] if relation.goal else []
    return {"kernel": kernel, "what": relation.what, "first": relation.first, "second": relation.second,
            "value": value, "goals": goal}  # fmt: skip


def verdict(record: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of the whole: cases by state, goals by level, and ``ok``: nothing bad, missed or left out."""
    states: dict[str, int] = {}
    levels: dict[str, int] = {}
    for row in record["cases"]:
        states[row["state"]] = states.get(row["state"], 0) + 1
    for row in (*record["cases"], *record["relations"]):
        for goal in row["goals"]:
            if goal["level"]:
                levels[goal["level"]] = levels.get(goal["level"], 0) + 1
    bad = any(states.get(s) for s in (*BAD, "not reached")) or levels.get("below must", 0) > 0
    return {"states": states, "goals": levels, "ok": not bad}


def _goal_row(goal: Any) -> Row:
    marks = {"must": goal.must, "target": goal.target, "stretch": goal.stretch}
    return {"of": goal.of, **marks, "value": None, "level": ""}


def _reached(goal: Row, value: float | None) -> Row:
    if value is None:
        return goal
    from workbench.kernels.bench.case import Goal

    marks = Goal(goal["must"], goal["target"], goal["stretch"], goal["of"])
    return {**goal, "value": value, "level": marks.level(value)}


def _beside(timed: Mapping[str, Any], ours: float) -> Row:
    """Something timed beside our kernel: how many times faster ours is."""
    if "median" not in timed:
        return dict(timed)
    return {**timed, "times_faster": timed["median"] / ours}
