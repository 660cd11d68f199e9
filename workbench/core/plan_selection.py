"""Whether a KV selector fits the rest of a plan: it moves rows, and some formats cannot move theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.engine.compaction import movable
from workbench.engine.seams import KVCodec, PageGeometry
from workbench.engine.selection import KVSelector
from workbench.spec.errors import OptionError
from workbench.spec.plan import Conflict


def selection_conflicts(configs: Mapping[str, Any], context: BindContext) -> list[Conflict]:
    """What stands between a plan's KV selector and its KV format, its drafter or the model."""
    by_seam = {catalog.get(i).spec.seam: i for i in configs}
    chosen = by_seam.get("kv_selector")
    if chosen is None:
        return []
    try:
        selector: KVSelector = catalog.get(chosen).bind(configs[chosen], context)
    except OptionError as err:
        return [Conflict(chosen, "model", "options", str(err))]
    title = catalog.get(chosen).spec.title
    windows = [group.window for group in context.config.kv_groups]
    out = []
    if None not in windows:
        remedy = f"Every layer of this model forgets behind a window: there is nothing for {title} to drop."
        out.append(Conflict(chosen, "model", "attention windows", remedy))
    elif selector.rerotates and len(windows) > 1:
        remedy = "Switch off rerotate: layers with a window keep their keys at their own positions."
        out.append(Conflict(chosen, "model", "positions", remedy))
    drafter = by_seam.get("drafter")
    if drafter is not None and catalog.get(drafter).spec.keeps_kv:
        remedy = (
            f"{catalog.get(drafter).spec.title} keeps KV of its own, whose rows would stay: choose another."
        )
        out.append(Conflict(chosen, drafter, "KV rows", remedy))
    codec_id = by_seam.get("kv_codec")
    if codec_id is not None:
        out += _with_format(chosen, selector, codec_id, configs[codec_id], context)
    return out


def _with_format(
    chosen: str, selector: KVSelector, codec_id: str, config: Any, context: BindContext
) -> list[Conflict]:
    title = catalog.get(codec_id).spec.title
    if selector.rerotates:
        remedy = f"Switch off rerotate: {title} would have to code turned keys a second time."
        return [Conflict(chosen, codec_id, "KV rows", remedy)]
    model = context.config
    geometry = PageGeometry(1, model.num_kv_heads, model.head_dim, context.page_size, 1, context.dtype)
    try:
        codec: KVCodec = catalog.get(codec_id).bind(config, context)
        fits = movable(codec, codec.planes(geometry))
    except OptionError:
        return []  # planning says so where it looks for the page size
    if not fits:
        remedy = (
            f"{title} codes whole pages, whose rows cannot be moved: switch off one of the two, or choose a "
            "format that codes by token."
        )
        return [Conflict(chosen, codec_id, "KV rows", remedy)]
    if selector.per_head and codec.calibration == "ranges":
        remedy = f"Choose a scale of {title} that is not calibrated: heads are stored apart here."
        return [Conflict(chosen, codec_id, "KV rows", remedy)]
    return []
