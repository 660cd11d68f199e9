"""From collected events to a :class:`Run`: latency, memory, acceptance, outputs, provenance.

Everything in a run's free-form fields is plain JSON data, so that a stored run equals the one that was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from workbench.core.latency import latency
from workbench.core.output import Output, live_tokens
from workbench.core.provenance import process_memory, provenance
from workbench.spec.errors import WorkbenchError
from workbench.spec.events import DraftRecord, JobState, StepEvent, fullest
from workbench.spec.plan import Plan
from workbench.spec.run import Metric, Run, plain
from workbench.speculative.stats import acceptance, by_source

__all__ = ["Collected", "Output", "build_run", "provenance", "step_row"]


@dataclass
class Collected:
    """Everything a request job saw; ``submitted`` and ``ready`` in seconds of ``time.perf_counter``."""

    outputs: list[Output]
    steps: list[StepEvent]
    submitted: float
    seed: int = 0
    notices: tuple[str, ...] = ()
    ready: float = 0.0


def build_run(
    collected: Collected,
    plan: Plan | None,
    state: JobState,
    profile: str,
    memory: Mapping[str, int],
    error: WorkbenchError | None = None,
    kind: str = "generate",
) -> Run:
    """The run of a request job, complete or partial."""
    drafts = [d for s in collected.steps for d in s.drafts]
    drawn = sum(t.source == "plain" for o in collected.outputs for t in o.tokens)
    held = fullest(collected.steps)  # while it ran: an idle engine holds no live tokens
    device = plan.device if plan else "cpu"
    return Run(
        id=uuid4().hex,
        kind=kind,
        model=plan.model if plan else "",
        weight_hash=plan.model_fingerprint if plan else "",
        recipe=[dict(u) for u in plan.recipe.to_json()] if plan else [],
        recipe_key=plan.recipe.key if plan else "",
        plan=plain(plan.to_dict()) if plan else {},
        numerics=plan.numerics if plan else "",
        dtype=plan.dtype if plan else "",
        seed=collected.seed,
        state="done" if state == "done" else "failed" if state == "failed" else "cancelled",
        prompts=tuple(dict.fromkeys(o.prompt for o in collected.outputs)),
        outputs=tuple(plain(o.to_dict()) for o in collected.outputs),
        metrics=(
            *latency(collected.outputs, collected.steps, collected.submitted, collected.ready),
            *kv_per_token(collected.outputs, collected.steps),
            *process_memory(device),
        ),
        memory=dict(memory if held is None else held),
        acceptance=plain(_acceptance(drafts, drawn)),
        path=collected.steps[-1].path if collected.steps else (),
        steps=tuple(step_row(s) for s in collected.steps),
        provenance=provenance(device, profile),
        notes=(
            *(plan.notes if plan else ()),
            *collected.notices,
            *dict.fromkeys(w for s in collected.steps for w in s.warnings),
        ),
        error=error.to_dict() if error is not None else None,
    )


def kv_per_token(outputs: Sequence[Output], steps: Sequence[StepEvent]) -> tuple[Metric, ...]:
    """Bytes of live KV per token it stands for, at the fullest step that only this job's outputs shared.

    Pages that several outputs share are held once and counted for each: sharing shows as fewer bytes.
    """
    best: tuple[int, int] = (0, 0)
    live = live_tokens(outputs, [s.step for s in steps])
    for step, (running, tokens) in zip(steps, live, strict=True):
        if running == step.running and tokens > best[1]:
            best = (step.bytes.get("kv_payload", 0) + step.bytes.get("kv_meta", 0), tokens)
    if not best[1]:
        return ()
    note = f"payload and metadata, {best[1]} tokens in the cache"
    return (Metric("kv_bytes_per_token", best[0] / best[1], "B", better="lower", note=note),)


def step_row(step: StepEvent) -> dict[str, Any]:
    """A step as plain data; times to 0.1 µs, which is more than the clock resolves."""
    row: dict[str, Any] = plain(asdict(step))
    row.pop("path")
    row["time"] = round(step.time, 6)
    row["phase_ms"] = {name: round(ms, 4) for name, ms in step.phase_ms.items()}
    return row


def _acceptance(drafts: Sequence[DraftRecord], drawn: int) -> dict[str, Any]:
    """The statistics and the ratios derived from them, by source where there are several; empty when nothing
    was drafted."""
    a, sources = acceptance(drafts, drawn), by_source(drafts)
    if not a.steps:
        return {}
    names = ("tau", "rate", "tokens_per_forward", "survival", "conditional", "alpha", "lengths", "mismatch")
    out = {**asdict(a), **{name: getattr(a, name) for name in names}}
    if len(sources) > 1:
        told = ("steps", "drafted", "accepted", "tau", "rate")
        out["sources"] = {source: {n: getattr(own, n) for n in told} for source, own in sources.items()}
    return out
