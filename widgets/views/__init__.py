"""Views: each answers one question about runs, as a plotly figure and as a table.

A view is a module with ``figure(runs, theme)`` and ``table(runs)``, pure functions of finished runs, the
latest last. A comparison reads the first and the last; the others draw the last. *pages* is a view of page
snapshots instead: which page is whose is a matter of moments, and no run keeps it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from workbench.spec.errors import OptionError, RecordError
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

VIEWS: dict[str, str] = {
    "memory": "Where is the memory?",
    "pages": "Who owns which page?",
    "steps": "Where is the time?",
    "acceptance": "How much of the draft is kept?",
    "draft_tree": "What was drafted, and why was this path kept?",
    "lengths": "How many drafted tokens does a round keep?",
    "reliability": "Is the drafter as sure as it may be?",
    "choices": "What do second choices of a draft tree add?",
    "round_time": "What does a round of speculation cost?",
    "speedup": "What does speculation gain, and what would it?",
    "latency": "How long until the next token?",
    "compare": "What changed between two runs?",
    "tokens": "Where did each token come from?",
}

_SPECULATION = "workbench.widgets.spec_views"
_ELSEWHERE = dict.fromkeys(
    ("draft_tree", "lengths", "reliability", "choices", "round_time", "speedup"), _SPECULATION
)


def to_figure(view: str, *runs: Any, theme: Theme = "auto") -> Any:
    """The plotly figure of a view. Raises :class:`OptionError`, and :class:`MissingExtra` without plotly."""
    return _module(view, runs).figure(runs, theme)


def to_table(view: str, *runs: Any) -> Table:
    """The table of a view; needs nothing installed."""
    table: Table = _module(view, runs).table(runs)
    return table


def _module(view: str, runs: Sequence[Any]) -> Any:
    if view not in VIEWS:
        raise OptionError(f"There is no view {view!r}.", hint=f"Views: {', '.join(VIEWS)}.")
    if not runs:
        raise RecordError(f"The view {view!r} needs a run.", hint="Run a prompt first: panel.run().wait().")
    return importlib.import_module(f"{_ELSEWHERE.get(view, __name__)}.{view}")
