"""Whether a drafter fits the model it drafts for: its layers, or a head that was trained for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.spec.errors import HeadMismatch, MissingHead, OptionError
from workbench.spec.plan import Conflict


def drafter_conflicts(configs: Mapping[str, Any], context: BindContext) -> list[Conflict]:
    """What the model lacks for it, in the drafter's own words."""
    out = []
    for technique_id, config in configs.items():
        technique = catalog.get(technique_id)
        if technique.spec.seam != "drafter":
            continue
        try:
            technique.bind(config, context)
        except OptionError as err:
            out.append(Conflict(technique_id, "model", "layers", str(err)))
        except (MissingHead, HeadMismatch) as err:
            out.append(Conflict(technique_id, "model", "head", str(err)))
    return out
