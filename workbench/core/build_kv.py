"""From a plan to its KV cache: KV groups, page stores, the format that codes them, and what names a page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from workbench.core import catalog
from workbench.core.at_rest import at_rest_codec
from workbench.core.bound import attention_op, bound
from workbench.core.build_weights import weights_key
from workbench.core.kv_calibration import kv_ranges
from workbench.core.kv_groups import (
    drafter_layers,
    group_pages,
    kv_geometries,
    kv_groups,
    kv_pools,
    kv_selector,
)
from workbench.core.room import require_pool
from workbench.core.xquant_calibration import sharing_harm
from workbench.engine.at_rest import AtRest, ColdCodec
from workbench.engine.bounds import reads_bounds
from workbench.engine.cold import ColdTier
from workbench.engine.cold_pages import ColdPages
from workbench.engine.kv import KVCache
from workbench.engine.page_bytes import PageBytes, pool_nbytes
from workbench.engine.resident import ResidentStore, mirror_nbytes
from workbench.engine.seams import AttentionOp, KVCodec, PageGeometry
from workbench.engine.selection import KVSelector
from workbench.engine.store import PageStore
from workbench.kv.plain import PlainCodec
from workbench.kv.storage import Storage
from workbench.models.config import KVGroup, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe


def kv_key(plan: Plan, config: ModelConfig) -> tuple[object, ...]:
    """What the KV cache depends on: two plans with equal keys can share one, cached pages included.

    A drafter's layers are counted: a head of another size may have been trained since.
    """
    seams = ("pages", "prefix", "kv_codec", "kv_selector", "kv_storage", "attention", "kernels")
    uses = tuple(u for u in plan.recipe if catalog.get(u.id).spec.seam in seams)
    drafters = tuple(u for u in plan.recipe if catalog.get(u.id).spec.keeps_kv)
    drafting = Recipe(drafters).key, drafter_layers(plan, config)
    return weights_key(plan), Recipe(uses).key, plan.page_size, plan.limits, *drafting


def require_memory(plan: Plan, config: ModelConfig) -> None:
    """Raises :class:`OptionError` unless the plan's KV pool fits into the memory that is available now."""
    codec: KVCodec = bound(plan, "kv_codec", config) or PlainCodec(getattr(torch, plan.dtype))
    sparse = reads_bounds(attention_op(plan, config))
    nbytes = 0
    for pool in _pools(plan, config):
        whole = pool[0].geometry  # of the largest
        nbytes += pool_nbytes(codec, whole, bounded=sparse and any(m.group.window is None for m in pool))
        nbytes += mirror_nbytes(whole) if keeps_decoded(plan, config, codec) else 0
    require_pool(plan.limits.kv_pool_tokens, nbytes, plan.device)


@dataclass(frozen=True)
class _Member:
    """KV group ``number`` of a pool."""

    number: int
    group: KVGroup
    geometry: PageGeometry


def _pools(plan: Plan, config: ModelConfig) -> list[list[_Member]]:
    """The KV groups of every pool, those of most layers first."""
    members = [
        _Member(i, group, geometry)
        for i, (group, geometry) in enumerate(
            zip(kv_groups(plan, config), kv_geometries(plan, config), strict=True)
        )
    ]
    numbers = kv_pools(plan, config)
    pools = [[m for m in members if numbers[m.number] == pool] for pool in dict.fromkeys(numbers)]
    return [sorted(pool, key=lambda m: -m.geometry.layers) for pool in pools]


def _stores(plan: Plan, config: ModelConfig, codec: KVCodec, sparse: bool) -> list[PageStore]:
    """A page store for every KV group, on the storages of its pool."""
    make = ResidentStore if keeps_decoded(plan, config, codec) else PageStore
    plain, made = _plain_codec(plan), dict[int, PageStore]()
    for pool in _pools(plan, config):
        held: PageBytes | None = None
        for m in pool:
            bounded = sparse and m.group.window is None
            store = make(codec, plain, m.geometry, m.group.layers, bounded=bounded, held=held)
            made[m.number], held = store, store.held
    return [made[number] for number in sorted(made)]


def keeps_decoded(plan: Plan, config: ModelConfig, codec: KVCodec) -> bool:
    """Whether a decoded copy of all pages is asked for and is not what the format holds anyway."""
    pages = bound(plan, "pages", config)
    return pages is not None and pages.decoded == "resident" and not codec.in_place


def _plain_codec(plan: Plan) -> PlainCodec:
    """16-bit (or wider) KV, written by the plan's kernels where it has some."""
    return PlainCodec(getattr(torch, plan.dtype), kernels=bound(plan, "kernels", None))


def kv_codec(
    plan: Plan, decoder: Decoder, progress: Progress | None = None, cancel: Cancel | None = None
) -> KVCodec:
    """The plan's KV format, calibrated if it asks for it; ``Cancelled`` while calibrating."""
    config = decoder.config
    kernels = bound(plan, "kernels", config)
    chosen: Any = bound(plan, "kv_codec", config, kernels=kernels)
    codec: KVCodec = chosen if chosen is not None else _plain_codec(plan)
    if codec.calibration == "none":
        return codec
    where: dict[str, Any] = {
        "model": plan.model,
        "weights": weights_key(plan),
        "progress": progress,
        "cancel": cancel,
    }

    def op() -> AttentionOp:
        return attention_op(plan, config)

    measured: dict[str, Any] = (
        {"kv_ranges": kv_ranges(decoder, op, **where)}
        if codec.calibration == "ranges"
        else {"kv_sharing": sharing_harm(decoder, op, chosen, **where)}
    )
    calibrated: KVCodec = bound(plan, "kv_codec", config, kernels=kernels, **measured)
    return calibrated


def cold_codec(
    plan: Plan, decoder: Decoder, progress: Progress | None = None, cancel: Cancel | None = None
) -> ColdCodec | None:
    """The codec that the plan's cold pages go through, calibrated; ``Cancelled`` while calibrating."""
    storage: Storage | None = bound(plan, "kv_storage", decoder.config)
    if storage is None:
        return None
    return at_rest_codec(
        storage,
        decoder,
        lambda: attention_op(plan, decoder.config),
        model=plan.model,
        weights=weights_key(plan),
        whole=False,
        progress=progress,
        cancel=cancel,
    )


def build_kv(
    plan: Plan, decoder: Decoder, progress: Progress | None = None, cancel: Cancel | None = None
) -> KVCache:
    """Page stores (one per KV group), their pools and prefix index, all empty; calibrates a format that asks.

    Raises :class:`OptionError` when the machine lacks the memory, ``Cancelled`` while calibrating.
    """
    config = decoder.config
    require_memory(plan, config)
    codec, selector = kv_codec(plan, decoder, progress, cancel), kv_selector(plan, config)
    groups, op = kv_groups(plan, config), attention_op(plan, config)
    sparse = reads_bounds(op)
    stores = _stores(plan, config, codec, sparse)
    resting = cold_codec(plan, decoder, progress, cancel)
    cache = KVCache(
        stores,
        pages=group_pages(plan),
        page_size=plan.page_size,
        namespace=namespace(plan, decoder, codec, op.name, selector, resting),
        index=bound(plan, "prefix", config),
        reserve=0 if "paged" in plan.provides else plan.limits.max_context,
        windows=[group.window for group in groups],
        prompts_only=sparse,
    )
    storage: Storage | None = bound(plan, "kv_storage", config)
    if storage is not None and resting is not None:
        tier = ColdTier(resting, storage.store(), storage.limit)
        cache.cold = ColdPages(tier, stores, groups)
    return cache


def namespace(
    plan: Plan,
    decoder: Decoder,
    codec: KVCodec,
    attention: str,
    selector: KVSelector | None = None,
    resting: AtRest | None = None,
) -> bytes:
    """Digest of everything but tokens and salt that shapes a cache entry (law 4)."""
    parts = (
        decoder.weights.fingerprint,
        repr(decoder.config),  # RoPE and windows shape the bytes, and the fingerprint covers tensors only
        "/".join(weights_key(plan)),
        codec.key,
        attention,
        selector.key if selector is not None else "",
        resting.key if resting is not None else "",
        plan.numerics,
        plan.dtype,
        str(plan.page_size),
    )
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).digest()
