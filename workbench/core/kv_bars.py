"""The table of bars: what each KV technique must reach on a real model, and what must fail without a part.

Bars are of protocol P1 on SmolLM2-135M-Instruct with 1,024 tokens of context, from numbers published with the
methods or measured for this repository, with about a third of slack. All is measured by one task; a bar that
is missed is shown as missed. On another model or context the same is measured, and no bar is held to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from workbench.core.kv_ablations import ABLATIONS
from workbench.core.kv_bench import methods_bench, named_metrics
from workbench.core.kv_methods import Method, method
from workbench.core.kv_p1 import submit_p1, that_fit
from workbench.core.kv_points import Points
from workbench.core.kv_result import MethodResult
from workbench.core.kv_storage_methods import Later
from workbench.core.quality_windows import QualitySettings
from workbench.spec.errors import OptionError
from workbench.spec.run import Metric, Run

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session

MODEL, CONTEXT = "smollm2-135m", 1024
"""What the bars are of."""
Of = Literal["kl", "codec_ratio", "row_error"]
_KEPT = ("kl", "perplexity_change", "codec_ratio", "whole_ratio", "top1", "row_error")


@dataclass(frozen=True)
class Bar:
    """What a method must reach: a codec ratio at least, KL (nats) and change of perplexity (%) at most."""

    method: str
    codec: float
    kl: float
    change: float


@dataclass(frozen=True)
class Check:
    """``name``'s number must be at least ``factor`` times that of ``against``; a size is 1 over the ratio."""

    name: str
    against: str
    of: Of
    factor: float


BARS = (
    Bar("kv_fp8:scale=layer", 2.0, 0.004, 1),
    Bar("kv_fp4", 3.55, 0.030, 8),
    Bar("kvtc:ratio=8", 9.0, 0.008, 2.5),
    Bar("kvtc:ratio=16", 18.0, 0.022, 3),
    Bar("kvtc:ratio=32", 34.0, 0.055, 6),
    Bar("kvtc:ratio=64", 65.0, 0.11, 12),
    Bar("cachegen", 5.5, 0.065, 9),
    Bar("cachegen:k=32/32/32,v=32/32/32", 4.6, 0.016, 4),
    Bar("cachegen:delta=true", 4.0, 0.030, 6),
    Bar("kivi", 3.2, 0.012, 2),
    Bar("kivi:bits=2", 5.3, 0.35, 35),
)
CHECKS = (
    Check("fp8, scale 1, K × 1024", "kv_fp8:scale=layer", "kl", 2),
    Check("nvfp4, scale 1, rows × 2^-8", "kv_fp4", "kl", 1.5),
    Check("kv_fp4:format=mxfp4", "kv_fp4", "kl", 1.8),
    Check("kivi 2 bits, K per token", "kivi:bits=2", "kl", 1.5),
    Check("xquant:eta2=0,schedule=none", "xquant:schedule=none", "kl", 1.13),
    Check("xquant:eta1=0,lk=0,lv=0,schedule=none", "xquant:lk=0,lv=0,schedule=none", "kl", 2.2),
    Check("xquant:schedule=none", "xquant", "kl", 0.74),
    Check("kvtc 8×, no sinks", "kvtc:ratio=8", "kl", 10),
    Check("kvtc 16×, basis per head", "kvtc:ratio=16", "kl", 10),
    Check("kvtc 16×, basis per layer", "kvtc:ratio=16", "kl", 10),
    Check("kvtc 32×, no bit program", "kvtc:ratio=32", "kl", 1.5),
    Check("kvtc:entropy=none,ratio=16", "kvtc:ratio=16", "codec_ratio", 1.12),
    Check("kvtc:ratio=16", "kvtc:entropy=range,ratio=16", "codec_ratio", 1.05),
    Check("cachegen, pooled tables", "cachegen", "codec_ratio", 1.08),
    Check("cachegen:delta=true", "cachegen:k=32/32/32,v=32/32/32", "codec_ratio", 1.0),
    Check("cachegen:delta=true", "cachegen:k=32/32/32,v=32/32/32", "kl", 1.0),
    Check("cachegen delta, exact anchors", "cachegen:delta=true", "row_error", 1.0),
    Check("curdkv, random tokens", "curdkv:recent=64,score=value", "kl", 1.0),
    Check("knorm:recent=64", "curdkv:recent=64,score=value", "kl", 1.0),
)
"""XQuant's third: shared where it harms least, 1.8 bits of code cost at most 1.35 times the KL of 2.
CacheGen's deltas: another level without them is smaller and better, so they lose. CurDKV: recent tokens
are kept everywhere, for most of what selectors differ by on plain text is how many of those they keep."""


@dataclass(frozen=True)
class Row:
    """One line of the table. Empty where a bar says nothing of it; ``met`` too, where no bar holds."""

    technique: str
    codec: float | None
    kl: float
    change: float
    bar: str
    met: bool | None


def bar_methods(only: tuple[str, ...] = ()) -> dict[str, Method]:
    """Every method that bars and checks speak of, or those of the techniques named.

    Raises :class:`OptionError` for a name that none of them has.
    """
    names = dict.fromkeys([*(b.method for b in BARS), *(n for c in CHECKS for n in (c.name, c.against))])
    words = {n: n.partition(":")[0].partition(" ")[0].rstrip(",").removeprefix("kv_") for n in names}
    known = {"fp4": "nvfp4"}
    words = {n: known.get(w, w) for n, w in words.items()}
    unknown = [o for o in only if o not in words.values()]
    if unknown:
        raise OptionError(
            f"No bar is of {unknown[0]!r}.", hint=f"Cells are {', '.join(dict.fromkeys(words.values()))}."
        )
    return {n: _named(n) for n in names if not only or words[n] in only}


def submit_bars(
    session: Session, settings: QualitySettings, *, only: tuple[str, ...] = (), points: Points | None = None
) -> Job:
    """Queue the measurement; the job's result is what :func:`bars_run` takes. Raises as ``submit_p1``.

    Methods that do not fit the model are left out.
    """
    methods, _ = that_fit(session, bar_methods(only), settings)
    return submit_p1(session, methods, settings=settings, points=points)


def rows_of(found: Mapping[str, MethodResult]) -> list[Row]:
    """The table: bars, then what must fail."""
    numbers = {n: {m.name: m.value for m in r.metrics()} for n, r in found.items()}
    out = []
    for bar in BARS:
        if bar.method in numbers:
            mine = numbers[bar.method]
            met = mine["codec_ratio"] >= bar.codec and mine["kl"] <= bar.kl
            met = met and mine["perplexity_change"] <= bar.change
            text = f"≥ {bar.codec:g}×, KL ≤ {bar.kl:g}, ΔPPL ≤ {bar.change:g} %"
            out.append(_row(bar.method, mine, text, met))
    for check in CHECKS:
        if check.name in numbers and check.against in numbers:
            mine, base = numbers[check.name], numbers[check.against]
            ratio = _times(check.of, mine, base)
            what = {"kl": "KL", "codec_ratio": "bytes", "row_error": "row error"}[check.of]
            sign = "≥" if check.factor > 1 else ">"
            text = f"{what} {sign} {check.factor:g}× of {check.against}: {ratio:.2f}×"
            out.append(_row(check.name, mine, text, ratio >= check.factor and ratio > 1))
    return out


def no_verdict(model: str, context: int) -> str:
    """Why no bar holds for this model and context, or nothing."""
    here = [model] if model != MODEL else []
    here += [f"{context:,} tokens"] if context != CONTEXT else []
    return f"no verdict on {' and '.join(here)}" if here else ""


def bars_run(session: Session, settings: QualitySettings, found: Mapping[str, MethodResult]) -> Run:
    """All of it as one run; its plan holds the table."""
    rows, unfit = rows_of(found), no_verdict(session.plan.model, settings.context)
    if unfit:
        rows = [replace(r, met=None) for r in rows]
    _, left_out = that_fit(session, bar_methods(), settings)
    metrics: list[Metric] = []
    for name, result in found.items():
        metrics += named_metrics(name, result, _KEPT)
    if not unfit:
        met = sum(r.met is True for r in rows)
        metrics.append(Metric("bars_met", met, "", note=f"of {len(rows)}", better="higher"))
    bench = {"name": "kv_bars", "contestants": list(found), "rows": [asdict(r) for r in rows]}
    notes = (f"bars are of {MODEL} and {CONTEXT:,} tokens of context{unfit and f': {unfit}'}", *left_out)
    return methods_bench(session, settings, bench, metrics, notes)


def _named(name: str) -> Method:
    return Later(ABLATIONS[name]) if name in ABLATIONS else method(name)


def _row(name: str, numbers: Mapping[str, float], bar: str, met: bool) -> Row:
    return Row(name, numbers.get("codec_ratio"), numbers["kl"], numbers["perplexity_change"], bar, met)


def _times(of: Of, mine: Mapping[str, float], base: Mapping[str, float]) -> float:
    if of == "codec_ratio":
        return base[of] / mine[of]
    return mine[of] / base[of] if base[of] else float("inf")
