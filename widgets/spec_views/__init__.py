"""Views of speculative decoding: what was drafted and kept, what rounds cost, what theory says they gain.

Each module answers one question: a function finds the numbers, in a run, in events as they come, or in a
stored run; what it returns has ``figure`` and ``table``; where stepping through teaches something, also
``live``, which works with the keyboard. Every number says whether it was measured or predicted.
"""

from __future__ import annotations

from workbench.widgets.lazy import names_in

_WHERE = {
    "HeadTraining": "head_training",
    "batches_of_bench": "crossover",
    "compare_drafters": "drafters",
    "curve_figure": "head_training",
    "drop_cache": "head_training",
    "drafters_here": "drafters",
    "law_of_rules": "rule_law",
    "measure_batches": "crossover",
    "PlacesLive": "places_live",
    "ReuseSurface": "reuse",
    "TwoLanes": "two_lanes",
    "operating_point": "speedup",
    "own_cache": "head_training",
    "lineage": "head_training",
    "read_exits": "exits",
    "read_rounds": "draft_tree",
    "recorded_curve": "head_training",
}

__all__ = list(_WHERE)

__getattr__ = names_in(__name__, _WHERE)
