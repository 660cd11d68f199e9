"""How a plan divides a model's KV: into groups with page tables of their own, and pools that groups share.

Layers of one attention type form a group, as a window gives pages back for all of them at once. Where a
model has several types, its groups are cut to equal numbers of layers, so that a page of one can serve any
other and all draw from one pool (as in vLLM's hybrid KV cache manager). The last group of a type may have
fewer layers; the rest of its pages is empty, and counts so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.core import catalog
from workbench.core.bound import bound
from workbench.engine.seams import KVCodec, PageGeometry
from workbench.engine.selection import KVSelector
from workbench.models.config import KVGroup, ModelConfig
from workbench.spec.plan import Plan


def drafter_layers(plan: Plan, config: ModelConfig) -> int:
    """KV layers the plan's drafter keeps; they follow the model's own in the pages of one KV group."""
    keeps = any(catalog.get(u.id).spec.keeps_kv for u in plan.recipe)
    return bound(plan, "drafter", config).kv_layers if keeps else 0


def draft_group(groups: Sequence[KVGroup]) -> int:
    """The KV group whose pages hold a drafter's layers: the first that sees all keys, if there is one."""
    windows = [group.window for group in groups]
    return windows.index(None) if None in windows else 0


def kv_selector(plan: Plan, config: ModelConfig) -> KVSelector | None:
    """The plan's KV selector."""
    selector: KVSelector | None = bound(plan, "kv_selector", config)
    return selector


def kv_groups(plan: Plan, config: ModelConfig) -> tuple[KVGroup, ...]:
    """The plan's KV groups: the model's, cut to equal size where one pool can hold them all.

    Where heads may keep different numbers of tokens, each head is a group.
    """
    selector = kv_selector(plan, config)
    if selector is None or not selector.per_head:
        alike = _alike(plan, config)
        return equal_groups(config.kv_groups, drafter_layers(plan, config)) if alike else config.kv_groups
    out: list[KVGroup] = []
    for group in config.kv_groups:
        if group.window is not None:
            out.append(group)
        else:
            out += [
                KVGroup((layer,), None, (head, head + 1))
                for layer in group.layers
                for head in range(config.num_kv_heads)
            ]
    return tuple(out)


def equal_groups(groups: Sequence[KVGroup], drafter: int = 0) -> tuple[KVGroup, ...]:
    """Groups cut so that none has more layers than the smallest of ``groups`` had.

    Where they differ by a quarter at most, the largest sets the size: what stays empty costs less than a
    table more. ``drafter`` layers go behind the first that sees all keys and count with it.
    """
    home = draft_group(groups)
    counts = [len(g.layers) + (drafter if i == home else 0) for i, g in enumerate(groups)]
    size = max(counts) if 4 * max(counts) <= 5 * min(counts) else min(counts)
    size = max(size, drafter + 1)
    out: list[KVGroup] = []
    for i, group in enumerate(groups):
        first = size - drafter if i == home else size
        starts = [0, *range(first, len(group.layers), size)]
        ends = [*starts[1:], len(group.layers)]
        out += [replace(group, layers=group.layers[a:b]) for a, b in zip(starts, ends, strict=True)]
    return tuple(out)


def kv_pools(plan: Plan, config: ModelConfig) -> tuple[int, ...]:
    """For each KV group the number of its pool: groups with pages of one size share one."""
    groups = kv_groups(plan, config)
    if not _alike(plan, config):
        return tuple(range(len(groups)))
    sizes = [None if group.heads is None else group.heads[1] - group.heads[0] for group in groups]
    kinds = list(dict.fromkeys(sizes))
    return tuple(kinds.index(size) for size in sizes)


def kv_geometries(plan: Plan, config: ModelConfig) -> list[PageGeometry]:
    """Sizes of the pages of every KV group; ``pages`` are those of its pool, so many for each group in it."""
    groups, pools = kv_groups(plan, config), kv_pools(plan, config)
    home, drafter = draft_group(groups), drafter_layers(plan, config)
    return [
        PageGeometry(
            layers=len(group.layers) + (drafter if i == home else 0),
            kv_heads=group.heads[1] - group.heads[0] if group.heads else config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=plan.page_size,
            pages=group_pages(plan) * pools.count(pool),
            dtype=getattr(torch, plan.dtype),
            device=torch.device(plan.device),
        )
        for i, (group, pool) in enumerate(zip(groups, pools, strict=True))
    ]


def group_pages(plan: Plan) -> int:
    """Pages that the pool has for each group: those of ``kv_pool_tokens``."""
    return -(-plan.limits.kv_pool_tokens // plan.page_size)


def _alike(plan: Plan, config: ModelConfig) -> bool:
    """Whether a page of any layers can hold those of others: not where layers read each other's codes, or
    have codes of different widths."""
    codec: KVCodec | None = bound(plan, "kv_codec", config)
    if codec is None or len(config.kv_groups) == 1:
        return True
    if codec.calibration != "none":
        return codec.calibration != "sharing"
    whole: Any = PageGeometry(
        1, config.num_kv_heads, config.head_dim, plan.page_size, 1, getattr(torch, plan.dtype)
    )
    planes = codec.planes(whole)
    return all(codec.at(layer).planes(whole) == planes for layer in range(config.num_layers))
