"""Rounds of a plan that are one program, on an engine that is there already."""

from __future__ import annotations

from workbench.core.bound import bound
from workbench.core.kv_groups import draft_group, kv_groups
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.engine import Engine
from workbench.engine.rounds import Rounds
from workbench.spec.errors import InvariantError
from workbench.spec.plan import Plan
from workbench.speculative.fused_round import SPEC, ChainDrafter, FusedPlacement


def with_rounds(plan: Plan, engine: Engine) -> Engine:
    """The engine, which runs its decodes in rounds of one program where the plan says so."""
    config = engine.executor.decoder.config
    placement = bound(plan, "placement", config)
    if not isinstance(placement, FusedPlacement):
        return engine
    drafter, runner = engine.drafting.drafter, engine.drafting.runner
    if not isinstance(drafter, ChainDrafter) or not isinstance(runner, DraftRunner):
        raise InvariantError("A plan asks for fused rounds without a drafter that drafts such chains.")
    home, context = draft_group(kv_groups(plan, config)), plan.limits.max_context
    engine.rounds = Rounds(
        placement.program(drafter, engine.executor, runner, home=home, context=context),
        runner,
        page_size=plan.page_size,
        vocab_size=config.vocab_size,
        reserve=engine.kv.extend,
        know=engine.drafting.know,
        ends=engine.eos_ids,
    )
    engine.path += (f"round:{SPEC.id}",)
    return engine
