"""Views of speculative decoding: what was drafted and kept, what rounds cost, what theory says they gain.

Each module answers one question: a function finds the numbers, in a run, in events as they come, or in a
stored run; what it returns has ``figure`` and ``table``; where stepping through teaches something, also
``live``, which works with the keyboard. Every number says whether it was measured or predicted.
"""

from __future__ import annotations

from workbench.widgets.lazy import names_in

_WHERE = {
    "batches_of_bench": "crossover",
    "compare_drafters": "drafters",
    "drafters_here": "drafters",
    "law_of_rules": "rule_law",
    "measure_batches": "crossover",
    "operating_point": "speedup",
    "read_exits": "exits",
    "read_rounds": "draft_tree",
}

__all__ = list(_WHERE)

__getattr__ = names_in(__name__, _WHERE)
