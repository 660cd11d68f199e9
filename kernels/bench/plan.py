"""What a run would do, without a GPU: every case with its floor, and how long the whole should take.

Floors are of the vendor's data sheet and marked as claimed; the estimate adds up floors, the repeats that the
timing rules ask for, and rough costs of starting and compiling, which are most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.kernels.bench import record, roster, timing
from workbench.kernels.bench.case import Case

#: Seconds, by experience with the ahead-of-time compiler and torch's start; for the estimate only.
START, CEILINGS, COMPILE, CHECK, MAKE = 8.0, 6.0, 3.0, 0.5, 0.7
#: A first version reaches about this share of its floor.
SHARE = 0.4


def planned(cases: Sequence[Case], jobs: int) -> dict[str, Any]:
    """Rows of the cases, the relations between them, kernels without cases, and the expected seconds."""
    timed = [case for case in cases if case.timed]
    gpu = sum(_gpu_seconds(case) for case in timed)
    compiles = sum(1 + len(case.variants) for case in cases)
    phases = {
        "start and ceilings": 2 * START + CEILINGS,
        "compile": START + COMPILE * compiles / max(1, jobs),
        "prove": CHECK * (len(cases) - len(timed)),
        "measure": gpu + MAKE * len(timed),
    }
    kernels = dict.fromkeys(case.kernel for case in cases)
    return {
        "cases": [record.row_of(case) for case in cases],
        "relations": [{"kernel": k, "what": r.what} for k in kernels for r in roster.relations_of(k)],
        "uncovered": roster.uncovered(),
        "floors_ms": 1e3 * sum(record.row_of(case)["claimed_floor"] for case in timed),
        "phases": phases,
        "seconds": sum(phases.values()),
    }


def _gpu_seconds(case: Case) -> float:
    """Warm-up and repeats of the case, its variants and two baselines."""
    one: float = record.row_of(case)["claimed_floor"] / SHARE
    repeats = timing.repeats(one)
    return float((3 + len(case.variants)) * one * (3 + repeats))
