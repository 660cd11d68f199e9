"""Results of KV methods as runs: one per method, with its provenance, for the record store and for tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.core.kv_result import MethodResult
from workbench.core.provenance import process_memory
from workbench.core.quality_windows import QualitySettings
from workbench.core.run_of import run_of
from workbench.models.registry import origin
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run


def method_run(
    plan: Plan, recipe: Recipe, metrics: Sequence[Metric], told: Mapping[str, Any], profile: str
) -> Run:
    """One method's run: ``plan`` is the plain engine's, ``told`` goes into the run's plan beside it."""
    note = origin(plan.model).get("weight_note")  # says when the weights were quantized before
    return run_of(
        plan,
        "measure",
        (*metrics, *process_memory(plan.device)),
        {"kind": "lossy", **told},
        recipe=recipe,
        profile=profile,
        path=(f"method:{recipe}",),
        notes=(str(note),) if note else (),
    )


def p1_run(plan: Plan, recipe: Recipe, result: MethodResult, settings: QualitySettings, profile: str) -> Run:
    """The run of a method measured by P1."""
    told = {"protocol": "p1", "quality": asdict(settings)}
    return method_run(plan, recipe, result.metrics(), told, profile)


@dataclass(frozen=True)
class RatePoint:
    """One method on the rate-distortion plane; ``spread`` is the lowest and the highest window's ``kl``.

    ``codec`` and ``whole`` are ratios to 16-bit KV, ``kl`` nats per token, ``change`` of perplexity and
    ``top1`` agreement in percent, ``windows`` their number.
    """

    technique: str
    method: str
    codec: float
    whole: float
    kl: float
    spread: tuple[float, float]
    change: float
    top1: float
    windows: int

    @classmethod
    def of(cls, run: Run) -> RatePoint | None:
        """The point of a P1 run; None for a run of something else."""
        names = ("whole_ratio", "kl", "perplexity_change", "top1")
        found = {n: m for n in names if (m := run.metric(n)) is not None}
        if len(found) < len(names) or not run.recipe:
            return None
        codec, kl = run.metric("codec_ratio"), found["kl"]
        whole = found["whole_ratio"].value
        return cls(
            technique="+".join(str(u["id"]) for u in run.recipe),
            method=run.subject,
            codec=codec.value if codec is not None else whole,
            whole=whole,
            kl=kl.value,
            spread=kl.spread or (kl.value, kl.value),
            change=found["perplexity_change"].value,
            top1=found["top1"].value,
            windows=kl.n,
        )


def frontier(points: Sequence[RatePoint], *, whole: bool = False) -> tuple[RatePoint, ...]:
    """The points that no other beats in both ratio and KL, by rising ratio."""
    ordered = sorted(points, key=lambda p: (-(p.whole if whole else p.codec), p.kl))
    out: list[RatePoint] = []
    for point in ordered:
        if not out or point.kl < out[-1].kl:
            out.append(point)
    return tuple(reversed(out))
