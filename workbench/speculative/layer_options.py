"""Options of drafters that are layers of their target, written once: whose they are, and how many."""

from __future__ import annotations

from typing import Any

from workbench.spec.technique import option


def layer_source() -> Any:
    """Whose layers they are."""
    return option(
        "auto",
        choices=("auto", "trained", "cut"),
        help="Layers distilled from the target, or its own as they are. auto: distilled, if there are any.",
    )


def layer_count() -> Any:
    """How many are cut out."""
    return option(
        0,
        low=0,
        high=1024,
        unit="layers",
        help="Layers cut out of the target: the first ones, and the last. 0: one more than a fifth.",
    )
