"""What the turns of ``bench two_places`` come to: speed, what of drafting was hidden, and what that cost.

Ratios are taken within a turn of all contestants and quoted as median and range. The co-run slowdown compares
the target's passes of equally many rows with a drafter at work on another core, and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from workbench.core.placed_run import TwoPlaces
from workbench.spec.run import Metric

BASE = "inline_1"
STREAMED = "mirror_streams"
PLACED = ("swiftspec", "mirror_sd", STREAMED)


@dataclass(frozen=True)
class Turned:
    """One prompt with one contestant, behind its first token: ``tokens`` in ``seconds``, ``rounds`` with a
    draft that kept ``accepted`` of ``drafted`` nodes; ``forward``: (rows, ms) of each pass, ``draft`` ms of
    each drafting phase. Of two places: shares of time, ``made`` nodes, and outcomes foreseen of those told.
    """

    ids: tuple[int, ...]
    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    forward: tuple[tuple[int, float], ...]
    draft: tuple[float, ...]
    hidden: float | None = None
    busy_target: float | None = None
    busy_draft: float | None = None
    made: int = 0
    hits: int = 0
    told: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Turned:
        """The turn of :meth:`to_dict`."""
        lists = {n: tuple(data[n]) for n in ("ids", "draft")}
        passes = tuple((int(r), float(ms)) for r, ms in data["forward"])
        return cls(**{**data, **lists, "forward": passes})


def turned(done: TwoPlaces, ids: Sequence[int]) -> Turned:
    """A run of one request, counted."""
    trace = done.trace("")
    behind = [s for s, w in zip(done.steps, done.target, strict=True) if w.start >= done.start]
    told = [r.hit for r in trace.rounds if r.hit is not None]
    placed = bool(done.traffic)
    return Turned(
        ids=tuple(ids),
        tokens=done.decoded,
        seconds=done.seconds,
        rounds=len(trace.rounds),
        drafted=sum(r.drafted for r in trace.rounds),
        accepted=sum(r.accepted for r in trace.rounds),
        forward=tuple((s.rows, round(s.phase_ms.get("forward", 0.0), 4)) for s in behind),
        draft=tuple(round(s.phase_ms.get("draft", 0.0), 4) for s in behind if s.draft),
        hidden=trace.hidden() if placed else None,
        busy_target=trace.busy("target") if placed else None,
        busy_draft=trace.busy("draft") if placed else None,
        made=sum(s.nodes for s in trace.spans if s.side == "draft"),
        hits=sum(told) if placed else 0,
        told=len(told) if placed else 0,
    )


def numbers(cell: str, rounds: Sequence[Mapping[str, Turned]], k: int, window: int) -> tuple[Metric, ...]:
    """All metrics: rates, ratios to one thread that does both, and what two places did.

    ``k`` tokens are drafted in one process, as many nodes verified by SwiftSpec; ``window`` of Mirror's.
    """
    if not rounds:
        return ()
    out: list[Metric] = []
    for name in rounds[0]:
        mine = [r[name] for r in rounds]
        out.append(_spread(f"{cell}:{name}", [t.rate for t in mine], "tok/s", better="higher"))
        if name != BASE:
            ratios = [t.rate / r[BASE].rate for t, r in zip(mine, rounds, strict=True)]
            out.append(_spread(f"{cell}:{name}/{BASE}", ratios, "×", of=BASE, better="higher"))
        drafted = sum(t.rounds for t in mine)
        if drafted:
            tau = 1 + sum(t.accepted for t in mine) / drafted
            out.append(Metric(f"{cell}:{name}:tau", tau, "tokens", n=drafted, better="higher"))
        same = sum(t.ids == r["plain_1"].ids for t, r in zip(mine, rounds, strict=True))
        out.append(Metric(f"{cell}:{name}:same_output", same / len(mine), "", n=len(mine)))
    return (
        *out,
        *_inline(cell, rounds, k),
        *(m for name in PLACED if name in rounds[0] for m in _placed(cell, name, rounds, k, window)),
    )


def _inline(cell: str, rounds: Sequence[Mapping[str, Turned]], k: int) -> list[Metric]:
    """What overlap could hide at most: the drafting phase in units of a plain step."""
    plain = [ms for r in rounds for rows, ms in r["plain_1"].forward if rows == 1]
    drafts = [ms for r in rounds for ms in r[BASE].draft]
    verify = _passes(rounds, BASE, k + 1)
    if not plain or not drafts or not verify:
        return []
    g_c = median(drafts) / median(plain)
    note = f"drafting {median(drafts):.3g} ms a round, a plain pass {median(plain):.3g} ms, one thread"
    v = median(verify) / median(plain)
    return [
        Metric(f"{cell}:g_c", g_c, "", n=len(drafts), note=note),
        Metric(f"{cell}:v", v, "", n=len(verify), note=f"a pass of {k + 1} rows over one of one, one thread"),
        Metric(
            f"{cell}:bound",
            (v + g_c) / max(v, g_c),
            "",
            tag="predicted",
            of=BASE,
            note="all of the shorter side hidden, the same acceptance, nothing lost to sharing",
        ),
    ]


def _placed(
    cell: str, name: str, rounds: Sequence[Mapping[str, Turned]], k: int, window: int
) -> list[Metric]:
    mine = [r[name] for r in rounds]
    out = []
    for what, better in (("hidden", "higher"), ("busy_target", ""), ("busy_draft", "")):
        values = [v for t in mine if (v := getattr(t, what)) is not None]
        if values:
            out.append(_spread(f"{cell}:{name}:{what}", values, "", better=better))  # type: ignore[arg-type]
    tokens = sum(t.tokens for t in mine)
    waste = (sum(t.made for t in mine) - sum(t.accepted for t in mine)) / tokens
    out.append(Metric(f"{cell}:{name}:wasted", waste, "nodes/token", n=tokens, better="lower"))
    told = sum(t.told for t in mine)
    if told:
        out.append(Metric(f"{cell}:{name}:foreseen", sum(t.hits for t in mine) / told, "", n=told))
    # Mirror's passes have other rows and ask the proxy: they say nothing about sharing alone.
    alone, beside = _passes(rounds, BASE, k + 1), _passes(rounds, name, k + 1) if name == "swiftspec" else []
    if alone and beside:
        slower = median(beside) / median(alone)
        note = f"passes of {k + 1} rows with a drafter at work on another core"
        out.append(Metric(f"{cell}:{name}:co_run", slower, "", n=len(beside), of=BASE, note=note))
    return out


def _passes(rounds: Sequence[Mapping[str, Turned]], name: str, rows: int) -> list[float]:
    return [ms for r in rounds for n, ms in r[name].forward if n == rows]


def _spread(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    of: str = "",
    better: Literal["higher", "lower", ""] = "",
) -> Metric:
    spread = (min(values), max(values))
    return Metric(name, median(values), unit, n=len(values), spread=spread, of=of, better=better)
