"""Exact or lossy: the badge of what judged a draft, told by what the verdicts say of themselves.

An exact rule reports no mismatch; a lossy one says how likely the model was to choose otherwise. So nothing
here knows the names of rules, and a rule that is lossy only above temperature 0 is exact at 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from workbench.spec.events import DraftRecord
from workbench.spec.technique import Kind

MARKS: dict[Kind, str] = {"exact": "○", "lossy": "◐", "simulated": "◌"}


def kind_of(records: Iterable[DraftRecord]) -> Kind:
    """*lossy* when any verdict reports what it changed."""
    return "lossy" if any(r.mismatch is not None for r in records) else "exact"


def badge(kind: Kind) -> str:
    """Mark and word, for titles and tables: ``○ exact``."""
    return f"{MARKS[kind]} {kind}"


def judged_by(records: Iterable[DraftRecord]) -> str:
    """Rules and badge in words: ``rule r1, ○ exact``."""
    records = tuple(records)
    rules = ", ".join(dict.fromkeys(r.rule for r in records if r.rule))
    return f"rule {rules}, {badge(kind_of(records))}" if rules else badge(kind_of(records))
