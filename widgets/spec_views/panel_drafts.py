"""The panel's *Drafts* tab as plain data: the latest rounds as trees, and what all of them come to.

A round is turned into data once, when it is first shown; the statistics are computed where they always are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from workbench.spec.events import DraftRecord, StepEvent
from workbench.speculative.stats import Acceptance, acceptance
from workbench.widgets.spec_views.badge import badge, kind_of
from workbench.widgets.spec_views.draft_tree import round_of
from workbench.widgets.spec_views.lengths import counts
from workbench.widgets.spec_views.round_time import PARTS, RoundTime, round_times

ROUNDS = 32  # trees kept on screen
BARS = 48  # rounds whose time is drawn


class DraftsTab:
    """What the tab of one run shows; :meth:`drawn` takes all steps of the run, time and again."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS)
        self._records: list[DraftRecord] = []
        self._steps = 0

    def drawn(self, steps: Sequence[StepEvent], plain: int) -> dict[str, Any]:
        """Everything the tab draws; empty when nothing was drafted. ``plain``: tokens without a draft."""
        for step in steps[self._steps :]:
            for record in step.drafts:
                self._records.append(record)
                words = f"round {len(self._records)}, "
                self._rounds.append(round_of(record, step.step, self._decode, words).to_dict())
        self._steps = len(steps)
        if not self._records:
            return {}
        a = acceptance(self._records, plain)
        times = round_times(steps)
        return {
            "title": f"Draft trees, {badge(kind_of(self._records))}",
            "kind": kind_of(self._records),
            "rule": self._records[-1].rule,
            "first": len(self._records) - len(self._rounds) + 1,
            "rounds": list(self._rounds),
            "survival": list(a.survival),
            "conditional": list(a.conditional),
            "lengths": list(zip(*counts({"histogram": a.histogram}), strict=True)),
            "times": [[*(t.parts[p] for p, *_ in PARTS), t.drafted, t.emitted] for t in times[-BARS:]],
            "plain_ms": _plain(times),
            "parts": [name for name, *_ in PARTS],
            "table": _table(a),
        }


def _plain(times: Sequence[RoundTime]) -> float | None:
    found = [t.total for t in times if not t.drafted]
    return median(found) if len(found) > 2 else None


def _table(a: Acceptance) -> dict[str, Any]:
    last = next((i for i, n in enumerate(a.survivors) if not n), len(a.survivors)) + 1
    rows = [
        [str(i + 1), str(n), f"{s:.0%}", f"{a.conditional[i]:.0%}" if i < len(a.conditional) else "–"]
        for i, (n, s) in enumerate(zip(a.survivors[:last], a.survival, strict=False))
    ]
    alpha = f", α {a.alpha:.2f}" if a.alpha is not None else ""
    kept = f"{a.accepted} of {a.drafted} kept"
    note = f"τ {a.tau:.3g} tokens a round over {a.steps} rounds{alpha}, {kept}, measured."
    columns = ["position", "accepted", "share of drafts", "given the one before"]
    return {"columns": columns, "rows": rows, "note": note}
