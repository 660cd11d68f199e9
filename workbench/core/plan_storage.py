"""Whether KV at rest fits the rest of a plan: its codecs take rows of uncompressed KV, of every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.core import catalog
from workbench.models.config import ModelConfig
from workbench.spec.plan import Conflict


def storage_conflicts(configs: Mapping[str, Any], model: ModelConfig) -> list[Conflict]:
    """What stands between a plan's KV at rest and its KV format, its KV selector or the model."""
    by_seam: dict[str, str] = {catalog.get(i).spec.seam: i for i in configs}
    chosen = by_seam.get("kv_storage")
    if chosen is None:
        return []
    title, out = catalog.get(chosen).spec.title, []
    for seam, resource, why in (
        ("kv_codec", "KV rows", "codes uncompressed pages, and coding twice loses twice"),
        ("kv_selector", "KV rows", "keeps whole pages, and a selector drops tokens out of them"),
    ):
        other = by_seam.get(seam)
        if other is not None:
            first = next(i for i in configs if i in (chosen, other))  # what was on before the other came
            remedy = f"{title} {why}: switch off {catalog.get(first).spec.title} first."
            out.append(Conflict(chosen, other, resource, remedy))
    if any(group.window is not None for group in model.kv_groups):
        remedy = (
            "Save conversations to files instead: layers of this model forget behind a window, and the pages "
            "that they still see are the first to go."
        )
        out.append(Conflict(chosen, "model", "attention windows", remedy))
    return out
