"""Step events of a run, as they were: it keeps plain rows, and rows of older runs have fewer fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.spec.run import Run

Source = Run | Iterable[StepEvent]


def steps_of(source: Source) -> tuple[StepEvent, ...]:
    """The steps of a run, live or stored, or the events themselves.

    Raises :class:`RecordError` for rows that lack what every step has.
    """
    if not isinstance(source, Run):
        return tuple(source)
    return tuple(_step(row) for row in source.steps)


def _step(row: Mapping[str, Any]) -> StepEvent:
    values = _known(StepEvent, {"path": (), **row})
    values["drafts"] = tuple(DraftRecord(**_known(DraftRecord, d)) for d in row.get("drafts", ()))
    return StepEvent(**values)


def _known(kind: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    lacking = [f.name for f in fields(kind) if _needed(f) and f.name not in row]
    if lacking:
        raise RecordError(f"A stored {kind.__name__} has no {lacking[0]}.", hint="Record the run again.")
    names = {f.name for f in fields(kind)}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k in names}


def _needed(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
