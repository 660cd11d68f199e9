"""Views of speculative decoding: what was drafted and kept, what rounds cost, what theory says they gain.

Each module answers one question: a function finds the numbers, in a run, in events as they come, or in a
stored run; what it returns has ``figure`` and ``table``; where stepping through teaches something, also
``live``, which works with the keyboard. Every number says whether it was measured or predicted.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "law_of_rules": "rule_law",
    "read_rounds": "draft_tree",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    """The function a view starts with, imported when it is first used."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
