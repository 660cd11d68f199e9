"""From a plan to a running engine: binds techniques to seams and sizes the KV pool.

Nothing is decided here; everything was decided in the plan. Rebuilding an engine for another recipe
reuses the decoder of the weight set that stays, so a toggle never recompiles or repacks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from workbench.attention.compiled import CompiledPages
from workbench.core import catalog
from workbench.core.at_rest import at_rest_codec
from workbench.core.binding import BindContext
from workbench.core.kv_calibration import kv_ranges
from workbench.core.room import require_pool
from workbench.core.xquant_calibration import sharing_harm
from workbench.engine.at_rest import AtRest, ColdCodec
from workbench.engine.bounds import reads_bounds
from workbench.engine.cold import ColdTier
from workbench.engine.cold_pages import ColdPages
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.draft_target import TargetDrafter
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor
from workbench.engine.kv import KVCache
from workbench.engine.resident import ResidentStore, mirror_nbytes
from workbench.engine.scheduler import Boundary, Scheduler
from workbench.engine.seams import AttentionOp, KVCodec, PageGeometry
from workbench.engine.selection import KVSelector
from workbench.engine.store import PageStore, pool_nbytes
from workbench.engine.text import MakeStream
from workbench.kv.plain import PlainCodec
from workbench.kv.storage import Storage
from workbench.models.compiled import compiled_pack
from workbench.models.config import KVGroup, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.plain import plain_pack
from workbench.models.progress import Cancel, Progress
from workbench.models.source import Source
from workbench.models.weightset import Pack, WeightSet, build_weight_set
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe


def context_of(plan: Plan, config: ModelConfig, **measured: Any) -> BindContext:
    """What the plan's techniques may know when they bind."""
    return BindContext(
        config=config,
        dtype=getattr(torch, plan.dtype),
        numerics=plan.numerics,
        device=torch.device(plan.device),
        page_size=plan.page_size,
        model=plan.model,
        fingerprint=plan.model_fingerprint,
        **measured,
    )


def weights_key(plan: Plan) -> tuple[str, str, str, str, str]:
    """What a weight set depends on: two plans with equal keys share one."""
    weights = [u for u in plan.recipe if catalog.get(u.id).spec.seam in ("weights", "kernels")]
    return plan.model, plan.dtype, plan.numerics, plan.device, Recipe(tuple(weights)).key


def build_weights(
    plan: Plan, source: Source, progress: Progress | None = None, cancel: Cancel | None = None
) -> WeightSet:
    """Pack the plan's weight set; cancellable between layers, progress per layer."""
    dtype = getattr(torch, plan.dtype)
    kernels = _bound(plan, "kernels", source.config)
    method = _bound(plan, "weights", source.config, kernels=kernels)

    pack: Pack
    if method is None and kernels is not None:
        pack = compiled_pack(kernels, source.config.activation)
    elif method is None:
        pack = plain_pack(dtype, plan.numerics, plan.device, activation=source.config.activation)
    else:

        def pack(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return method.pack(name, weight, bias, dtype=dtype, numerics=plan.numerics, device=plan.device)

    return build_weight_set(
        source,
        pack,
        dtype,
        plan.numerics,
        progress,
        cancel,
        method=method.name if method is not None else "plain",
        device=plan.device,
    )


def attention_op(plan: Plan, config: ModelConfig) -> AttentionOp:
    """The plan's attention form, or the default one for its numerics class and kernels."""
    chosen: AttentionOp | None = _bound(plan, "attention", config)
    if chosen is not None:
        return chosen
    kernels = _bound(plan, "kernels", config)
    if kernels is not None:
        return CompiledPages(kernels)
    sdpa = catalog.get("sdpa")
    op: AttentionOp = sdpa.bind(sdpa.configure({}), context_of(plan, config))
    return op


def kv_key(plan: Plan) -> tuple[object, ...]:
    """What the KV cache depends on: two plans with equal keys can share one, cached pages included."""
    seams = ("pages", "prefix", "kv_codec", "kv_selector", "kv_storage", "attention", "kernels")
    uses = tuple(u for u in plan.recipe if catalog.get(u.id).spec.seam in seams)
    drafters = tuple(u for u in plan.recipe if catalog.get(u.id).spec.keeps_kv)
    return weights_key(plan), Recipe(uses).key, plan.page_size, plan.limits, Recipe(drafters).key


def drafter_layers(plan: Plan, config: ModelConfig) -> int:
    """KV layers the plan's drafter keeps; they follow the model's own in the pages of one KV group."""
    keeps = any(catalog.get(u.id).spec.keeps_kv for u in plan.recipe)
    return _bound(plan, "drafter", config).kv_layers if keeps else 0


def draft_group(config: ModelConfig) -> int:
    """The KV group whose pages hold a drafter's layers: one that sees all keys, if there is one."""
    windows = [group.window for group in config.kv_groups]
    return windows.index(None) if None in windows else 0


def draft_runner(plan: Plan, drafter: Any, target: Decoder, kv: KVCache) -> DraftRunner | None:
    """What runs the layers of a drafter that has some."""
    config = target.config
    if not drafter_layers(plan, config):
        return None
    home, own = draft_group(config), drafter.decoder(target)
    group = config.kv_groups[home]
    groups = (KVGroup(tuple(range(own.config.num_layers)), group.window),)
    op = attention_op(plan, config)
    executor = Executor(own, [kv.stores[home]], op, groups, below=len(group.layers))
    own.reserve(plan.limits.max_context)
    runner = DraftRunner(executor, home, plan.page_size)
    drafter.attach(runner)
    return runner


def kv_selector(plan: Plan, config: ModelConfig) -> KVSelector | None:
    """The plan's KV selector."""
    selector: KVSelector | None = _bound(plan, "kv_selector", config)
    return selector


def kv_groups(plan: Plan, config: ModelConfig) -> tuple[KVGroup, ...]:
    """The model's KV groups; where heads may keep different numbers of tokens, each head is one."""
    selector = kv_selector(plan, config)
    if selector is None or not selector.per_head:
        return config.kv_groups
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


def kv_geometries(plan: Plan, config: ModelConfig) -> list[PageGeometry]:
    """Sizes of the pages of every KV group."""
    return [
        PageGeometry(
            layers=len(group.layers) + (drafter_layers(plan, config) if i == draft_group(config) else 0),
            kv_heads=group.heads[1] - group.heads[0] if group.heads else config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=plan.page_size,
            pages=-(-plan.limits.kv_pool_tokens // plan.page_size),
            dtype=getattr(torch, plan.dtype),
            device=torch.device(plan.device),
        )
        for i, group in enumerate(kv_groups(plan, config))
    ]


def require_memory(plan: Plan, config: ModelConfig) -> None:
    """Raises :class:`OptionError` unless the plan's KV pool fits into the memory that is available now."""
    codec: KVCodec = _bound(plan, "kv_codec", config) or PlainCodec(getattr(torch, plan.dtype))
    geometries = kv_geometries(plan, config)
    sizes = zip(geometries, kv_groups(plan, config), strict=True)
    sparse = reads_bounds(attention_op(plan, config))
    nbytes = sum(pool_nbytes(codec, g, bounded=sparse and group.window is None) for g, group in sizes)
    if keeps_decoded(plan, config, codec):
        nbytes += sum(map(mirror_nbytes, geometries))
    require_pool(plan.limits.kv_pool_tokens, nbytes, plan.device)


def keeps_decoded(plan: Plan, config: ModelConfig, codec: KVCodec) -> bool:
    """Whether a decoded copy of all pages is asked for and is not what the format holds anyway."""
    pages = _bound(plan, "pages", config)
    return pages is not None and pages.decoded == "resident" and not codec.in_place


def _plain_codec(plan: Plan) -> PlainCodec:
    """16-bit (or wider) KV, written by the plan's kernels where it has some."""
    return PlainCodec(getattr(torch, plan.dtype), kernels=_bound(plan, "kernels", None))


def kv_codec(
    plan: Plan, decoder: Decoder, progress: Progress | None = None, cancel: Cancel | None = None
) -> KVCodec:
    """The plan's KV format, calibrated if it asks for it; ``Cancelled`` while calibrating."""
    config = decoder.config
    kernels = _bound(plan, "kernels", config)
    bound: Any = _bound(plan, "kv_codec", config, kernels=kernels)
    codec: KVCodec = bound if bound is not None else _plain_codec(plan)
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
        else {"kv_sharing": sharing_harm(decoder, op, bound, **where)}
    )
    calibrated: KVCodec = _bound(plan, "kv_codec", config, kernels=kernels, **measured)
    return calibrated


def cold_codec(
    plan: Plan, decoder: Decoder, progress: Progress | None = None, cancel: Cancel | None = None
) -> ColdCodec | None:
    """The codec that the plan's cold pages go through, calibrated; ``Cancelled`` while calibrating."""
    storage: Storage | None = _bound(plan, "kv_storage", decoder.config)
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
    """Page stores (one per KV group), pools and prefix index, all empty; calibrates a format that asks.

    Raises :class:`OptionError` when the machine lacks the memory, ``Cancelled`` while calibrating.
    """
    config, plain = decoder.config, _plain_codec(plan)
    require_memory(plan, config)
    codec, selector = kv_codec(plan, decoder, progress, cancel), kv_selector(plan, config)
    groups, op = kv_groups(plan, config), attention_op(plan, config)
    sparse = reads_bounds(op)
    make = ResidentStore if keeps_decoded(plan, config, codec) else PageStore
    stores = [
        make(codec, plain, geometry, group.layers, bounded=sparse and group.window is None)
        for geometry, group in zip(kv_geometries(plan, config), groups, strict=True)
    ]
    pages = stores[0].geometry.pages
    resting = cold_codec(plan, decoder, progress, cancel)
    cache = KVCache(
        stores,
        pages=pages,
        page_size=plan.page_size,
        namespace=namespace(plan, decoder, codec, op.name, selector, resting),
        index=_bound(plan, "prefix", config),
        reserve=0 if "paged" in plan.provides else plan.limits.max_context,
        windows=[group.window for group in groups],
        prompts_only=sparse,
    )
    storage: Storage | None = _bound(plan, "kv_storage", config)
    if storage is not None and resting is not None:
        tier = ColdTier(resting, storage.store(), storage.limit)
        cache.cold = ColdPages(tier, stores, groups)
    return cache


def build_engine(
    plan: Plan,
    decoder: Decoder,
    kv: KVCache,
    make_stream: MakeStream | None,
    eos_ids: tuple[int, ...],
    selector: KVSelector | None = None,
) -> Engine:
    """An idle engine for the plan on an existing (idle) KV cache; ``selector`` in place of the plan's."""
    config, codec, op = decoder.config, kv.stores[0].codec, attention_op(plan, decoder.config)
    decoder.reserve(plan.limits.max_context)  # now, so that the bytes shown are all that will be held
    budget = _bound(plan, "scheduler", config)
    scheduler = Scheduler(
        kv,
        max_sequences=plan.limits.max_sequences,
        max_batch_tokens=budget if budget is not None else plan.limits.max_batch_tokens,
        boundaries=_boundaries(plan, codec, op),
    )
    drafter, selector = _bound(plan, "drafter", config), selector or kv_selector(plan, config)
    if isinstance(drafter, TargetDrafter):
        drafter.attach_target(decoder)
    verify = None
    if drafter is not None:
        rule = catalog.get("verify")
        verify = _bound(plan, "verify", config) or rule.bind(rule.configure({}), context_of(plan, config))
    static = {"weights": decoder.weights.nbytes() + decoder.table_nbytes}
    shared = codec.nbytes + (kv.cold.tier.codec.nbytes if kv.cold is not None else 0)
    if shared:
        static["calibration"] = shared
    path = (f"attention:{op.name}", f"kv:{codec.key}", *(f"linear:{k}" for k in decoder.weights.kernels()))
    if kv.cold is not None:
        path += (f"rest:{kv.cold.tier.codec.key}",)
    if keeps_decoded(plan, config, codec):
        path += ("decoded:resident",)
    if selector is not None:
        path += (f"select:{selector.key}",)
    return Engine(
        Executor(decoder, kv.stores, op, kv_groups(plan, config)),
        kv,
        scheduler,
        context=plan.limits.max_context,
        eos_ids=eos_ids,
        drafter=drafter,
        runner=draft_runner(plan, drafter, decoder, kv),
        verify=verify,
        control=_bound(plan, "control", config),
        selector=selector,
        make_stream=make_stream,
        static_bytes=static,
        path=path + ((f"draft:{drafter.name}",) if drafter is not None else ()),
    )


def standalone_engine(plan: Plan, decoder: Decoder, selector: KVSelector | None = None) -> Engine:
    """An engine for measuring: a KV pool of its own, on a decoder that may be shared; it makes no text.

    ``selector`` takes the place of the plan's: one that is no technique, to compare with.
    """
    with torch.inference_mode():
        return build_engine(plan, decoder, build_kv(plan, decoder), None, (), selector)


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


def _bound(plan: Plan, seam: str, config: Any, **measured: Any) -> Any:
    """The plan's technique on a seam, bound, with what was measured for it (fields of the context); None when
    the seam is left to the engine."""
    for use in plan.recipe:
        technique = catalog.get(use.id)
        if technique.spec.seam == seam:
            return technique.bind(plan.configs[use.id], context_of(plan, config, **measured))
    return None


def _boundaries(plan: Plan, codec: KVCodec, op: AttentionOp) -> tuple[Boundary, ...]:
    """Where blocks are cut: at the ends of pages that are coded whole, or that decoding rows choose among."""
    end = _page_end(plan.page_size)
    out: tuple[Boundary, ...] = (end,) if codec.grain == "page" else ()
    if reads_bounds(op):
        out += (lambda seq: seq.prompt_len - seq.computed if seq.computed < seq.prompt_len else end(seq),)
    return out


def _page_end(page_size: int) -> Boundary:
    return lambda seq: page_size - seq.computed % page_size
