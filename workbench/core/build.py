"""From a plan to a running engine: binds techniques to seams and sizes the KV pool.

Nothing is decided here; everything was decided in the plan. Rebuilding an engine for another recipe
reuses the decoder of the weight set that stays, so a toggle never recompiles or repacks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from workbench.core import catalog
from workbench.core.bound import attention_op, bound, context_of
from workbench.core.build_kv import build_kv, keeps_decoded
from workbench.core.build_rounds import with_rounds
from workbench.core.build_weights import head_pack
from workbench.core.kv_groups import draft_group, drafter_layers, kv_groups, kv_selector
from workbench.engine.bounds import reads_bounds
from workbench.engine.chain_runner import ChainRunner
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.draft_target import attach_target
from workbench.engine.drafting import Runner
from workbench.engine.engine import Engine
from workbench.engine.executor import Executor
from workbench.engine.exit_control import ExitControl
from workbench.engine.exit_runner import ExitDrafter, ExitRunner
from workbench.engine.feature_runner import FeatureRunner
from workbench.engine.kv import KVCache
from workbench.engine.scheduler import Boundary, Scheduler
from workbench.engine.seams import AttentionOp, KVCodec
from workbench.engine.selection import KVSelector
from workbench.engine.split_runner import PeekingDrafter, SplitRunner
from workbench.engine.text import MakeStream
from workbench.models.config import KVGroup
from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import FeatureDecoder
from workbench.models.mtp_chain import ChainDecoder
from workbench.spec.plan import Plan


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
    budget = bound(plan, "scheduler", config)
    scheduler = Scheduler(
        kv,
        max_sequences=plan.limits.max_sequences,
        max_batch_tokens=budget if budget is not None else plan.limits.max_batch_tokens,
        boundaries=_boundaries(plan, codec, op),
    )
    drafter, selector = bound(plan, "drafter", config), selector or kv_selector(plan, config)
    attach_target(drafter, decoder, partial(head_pack, plan))
    control = bound(plan, "control", config)
    if isinstance(drafter, ExitDrafter) and isinstance(control, ExitControl):
        drafter.steer(control)
    runner = draft_runner(plan, drafter, decoder, kv)
    kv.ends.rereads = runner.rereads if isinstance(runner, DraftRunner) else 0
    verify = None
    if drafter is not None:
        rule = catalog.get("verify")
        verify = bound(plan, "verify", config) or rule.bind(rule.configure({}), context_of(plan, config))
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
    engine = Engine(
        Executor(decoder, kv.stores, op, kv_groups(plan, config)),
        kv,
        scheduler,
        context=plan.limits.max_context,
        eos_ids=eos_ids,
        drafter=drafter,
        runner=runner,
        verify=verify,
        control=control,
        selector=selector,
        make_stream=make_stream,
        static_bytes=static,
        path=path + ((f"draft:{drafter.name}",) if drafter is not None else ()),
    )
    return with_rounds(plan, engine)


def standalone_engine(plan: Plan, decoder: Decoder, selector: KVSelector | None = None) -> Engine:
    """An engine for measuring: a KV pool of its own, on a decoder that may be shared; it makes no text.

    ``selector`` takes the place of the plan's: one that is no technique, to compare with.
    """
    with torch.inference_mode():
        return build_engine(plan, decoder, build_kv(plan, decoder), None, (), selector)


def draft_runner(plan: Plan, drafter: Any, target: Decoder, kv: KVCache) -> Runner | None:
    """What runs the layers of a drafter that has some, that is some of the target's, or that is shown one."""
    config = target.config
    if isinstance(drafter, PeekingDrafter):
        own_pass = Executor(target, kv.stores, attention_op(plan, config), kv_groups(plan, config))
        return SplitRunner(own_pass, drafter)
    if isinstance(drafter, ExitDrafter):
        shared = Executor(target, kv.stores, attention_op(plan, config), kv_groups(plan, config))
        made = ExitRunner(shared, drafter.exit_layers, reuse=drafter.reuse)
        drafter.attach(made)
        return made
    if not drafter_layers(plan, config):
        return None
    known = kv_groups(plan, config)
    home, own = draft_group(known), drafter.decoder(target, head_pack(plan, config, drafter.bits))
    group = known[home]
    groups = (KVGroup(tuple(range(own.config.num_layers)), group.window),)
    op = attention_op(plan, config)
    executor = Executor(own, [kv.stores[home]], op, groups, below=len(group.layers))
    own.reserve(plan.limits.max_context)
    runner = _runner_type(own)(executor, home, plan.page_size)
    drafter.attach(runner)
    return runner


def _runner_type(own: Decoder) -> type[DraftRunner]:
    if isinstance(own, ChainDecoder):
        return ChainRunner
    return FeatureRunner if isinstance(own, FeatureDecoder) else DraftRunner


def _boundaries(plan: Plan, codec: KVCodec, op: AttentionOp) -> tuple[Boundary, ...]:
    """Where blocks are cut: at the ends of pages that are coded whole, or that decoding rows choose among."""
    end = _page_end(plan.page_size)
    out: tuple[Boundary, ...] = (end,) if codec.grain == "page" else ()
    if reads_bounds(op):
        out += (lambda seq: seq.prompt_len - seq.computed if seq.computed < seq.prompt_len else end(seq),)
    return out


def _page_end(page_size: int) -> Boundary:
    return lambda seq: page_size - seq.computed % page_size
