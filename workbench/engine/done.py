"""What one step has come to so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from workbench.engine.draft_seams import DraftTree
from workbench.engine.scheduler import Batch
from workbench.spec.events import DraftRecord, RequestEvent


@dataclass
class Done:
    """``rows`` counts the rows of spans that are dealt with, ``fused`` sequences whose round was a program.

    ``peak``: bytes held before a selector let rows go.
    """

    batch: Batch
    drafts: dict[int, DraftTree] = field(default_factory=dict)
    events: list[RequestEvent] = field(default_factory=list)
    records: list[DraftRecord] = field(default_factory=list)
    queries: Mapping[int, Tensor] = field(default_factory=dict)
    captured: Mapping[int, Tensor] = field(default_factory=dict)
    rows: int = 0
    fused: int = 0
    peak: dict[str, int] = field(default_factory=dict)
