"""Whether a drafter fits the model it drafts for: its layers, or a head that was trained for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.spec.errors import HeadMismatch, MissingHead, OptionError
from workbench.spec.plan import Conflict
from workbench.speculative.fused_round import ChainDrafter, FusedPlacement


def drafter_conflicts(configs: Mapping[str, Any], context: BindContext) -> list[Conflict]:
    """What the model lacks for it, in the drafter's own words."""
    out = []
    placed = next((i for i in configs if catalog.get(i).spec.seam == "placement"), None)
    if placed is not None and "compiled" in configs:
        placement = catalog.get(placed).bind(configs[placed], context)
        if isinstance(placement, FusedPlacement) and placement.traced:
            remedy = "Set graph to off: torch.compile cannot look into layers that are compiled already."
            out.append(Conflict(placed, "compiled", "layers", remedy))
    for technique_id, config in configs.items():
        technique = catalog.get(technique_id)
        if technique.spec.seam not in ("drafter", "control"):
            continue
        try:
            drafter = technique.bind(config, context)
            if placed is not None and "fixed_chain" in technique.spec.provides:
                whole = "Draft with layers of the model itself: a second model is no part of the program."
                remedy = drafter.chain_obstacle if isinstance(drafter, ChainDrafter) else whole
                if remedy:
                    out.append(Conflict(placed, technique_id, "shape of drafts", remedy))
        except OptionError as err:
            out.append(Conflict(technique_id, "model", "layers", str(err)))
        except (MissingHead, HeadMismatch) as err:
            out.append(Conflict(technique_id, "model", "head", str(err)))
    return out
