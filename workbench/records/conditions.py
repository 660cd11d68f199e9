"""What must be equal for two runs to be compared fairly, and the sentences for what is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.spec.run import Run


def unfair(a: Run, b: Run) -> tuple[str, ...]:
    """One sentence for every condition that differs besides the recipe; empty when the comparison is fair."""
    out = []
    for name, x, y in _conditions(a, b):
        if x != y:
            out.append(f"{name} differs: {_show(x)} against {_show(y)}.")
    for which, run in (("first", a), ("second", b)):
        if run.state != "done":
            out.append(f"The {which} run was {run.state}: its numbers cover only what it did.")
    if a.provenance is not None and b.provenance is not None:
        if "interactive" in (a.provenance.profile, b.provenance.profile) and _timed(a) and _timed(b):
            out.append(
                "Times of the interactive profile share the process with a notebook; quote bench ratios."
            )
        elif a.kind != "bench" and _timed(a) and _timed(b):
            out.append("Times come from two separate runs; ratios are quoted from one interleaved run.")
    lengths = [[len(o.get("token_ids", ())) for o in r.outputs] for r in (a, b)]
    if lengths[0] != lengths[1] and a.prompts == b.prompts and a.outputs and b.outputs:
        out.append(
            f"Outputs differ in length ({sum(lengths[0])} and {sum(lengths[1])} tokens): so does KV memory."
        )
    return tuple(out)


def _conditions(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    rows: list[tuple[str, Any, Any]] = [
        ("The kind of run", a.kind, b.kind),
        ("The model", a.model, b.model),
        ("The weights", a.weight_hash[:12], b.weight_hash[:12]),
        ("The dtype", a.dtype, b.dtype),
        ("The numerics class", a.numerics, b.numerics),
        ("The seed", a.seed, b.seed),
        ("The set of prompts", a.prompts, b.prompts),
        ("Sampling", _sampling(a), _sampling(b)),
    ]
    rows += [
        (f"The limit {name}", value, _limits(b)[name])
        for name, value in _limits(a).items()
        if name in _limits(b)
    ]
    p, q = a.provenance, b.provenance
    if p is not None and q is not None:
        rows += [
            ("The profile", p.profile, q.profile),
            ("The number of threads", p.threads, q.threads),
            ("The processor", p.cpu, q.cpu),
            ("The device", p.device, q.device),
            ("The system", p.platform, q.platform),
            ("PyTorch", p.torch, q.torch),
            ("The workbench version", p.workbench, q.workbench),
            ("The environment", dict(p.environment), dict(q.environment)),
        ]
    return rows


def _limits(run: Run) -> Mapping[str, Any]:
    limits = run.plan.get("limits")
    return limits if isinstance(limits, Mapping) else {}


def _sampling(run: Run) -> list[Any]:
    return [o.get("sampling") for o in run.outputs][:1]


def _timed(run: Run) -> bool:
    return any(m.unit in ("ms", "s", "tok/s") for m in run.metrics)


def _show(value: Any) -> str:
    text = f"{len(value)} prompts" if isinstance(value, tuple) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
