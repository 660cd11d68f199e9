"""Acceptance statistics: the one place where their definitions live.

Everything is computed from :class:`~workbench.spec.events.DraftRecord` s, after truncation: tokens cut by
an end token, a stop string or the budget count as not accepted and not emitted. The root (the last
committed token) is no draft token, so ``drafted`` compares with vLLM's num_speculative_tokens and is one
less than SGLang's num_draft_tokens or EAGLE's total_token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workbench.spec.events import DraftRecord, Event, RequestEvent, StepEvent


@dataclass(frozen=True)
class Acceptance:
    """Counts of a set of verified drafts; ratios over nothing are None.

    ``steps`` verified drafts (one sequence in one target forward each), ``drafted`` tokens in them,
    ``accepted`` drafts that were emitted, ``emitted`` tokens in all, ``plain`` tokens that came from a
    forward without a draft. ``survivors[i]`` counts steps with more than i accepted tokens.
    ``histogram`` maps a draft's depth to counts of steps by accepted tokens 0 … depth. ``cut`` counts
    steps that lost tokens to truncation. ``expected_sum`` and ``expected_n`` add up ``DraftRecord.expected``
    of the places that a token was emitted from, ``mismatch_sum`` adds up ``DraftRecord.mismatch`` of what was
    emitted, None when every rule was exact.
    """

    steps: int
    drafted: int
    accepted: int
    emitted: int
    plain: int
    cut: int
    survivors: tuple[int, ...]
    histogram: Mapping[int, tuple[int, ...]]
    expected_sum: float
    expected_n: int
    mismatch_sum: float | None = None

    @property
    def tau(self) -> float | None:
        """Mean acceptance length (*block efficiency* in papers): tokens emitted per verified draft.

        Steps without a draft are left out; :attr:`tokens_per_forward` counts them.
        """
        return self.emitted / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Draft acceptance rate: accepted per drafted token."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens per sequence and target forward, those without a draft included."""
        forwards = self.steps + self.plain
        return (self.emitted + self.plain) / forwards if forwards else None

    @property
    def survival(self) -> tuple[float, ...]:
        """Rate by draft position, unconditional: share of steps that accepted more than i tokens.

        Without truncation tau = 1 + their sum.
        """
        return tuple(n / self.steps for n in self.survivors)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Rate by draft position given that the position before was accepted."""
        before = (self.steps, *self.survivors)
        return tuple(n / b for n, b in zip(self.survivors, before, strict=False) if b)

    @property
    def alpha(self) -> float | None:
        """Mean of Σ min(p, q) over drafted tokens that verification reached (Rao–Blackwell estimate)."""
        return self.expected_sum / self.expected_n if self.expected_n else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Accepted-length histogram: steps that accepted 0, 1, 2, … tokens, whatever was drafted."""
        most = max(self.histogram, default=-1)
        return tuple(sum(c[n] for d, c in self.histogram.items() if n <= d) for n in range(most + 1))

    @property
    def mismatch(self) -> float | None:
        """Share of emitted tokens that the target itself would have chosen otherwise; None for exact rules.

        The mean of 1 - p(x) over accepted tokens, and 0 for tokens the target drew itself.
        """
        total = self.emitted + self.plain
        return self.mismatch_sum / total if self.mismatch_sum is not None and total else None


def acceptance(records: Iterable[DraftRecord], plain: int = 0) -> Acceptance:
    """Statistics of ``records``; ``plain`` tokens came from forwards without a draft, one each."""
    records = tuple(records)
    kept = [_kept(r) for r in records]
    depth = [max(_depths(r.parents), default=0) for r in records]
    expected = [e for r in records for e in _expected(r)]
    counts: dict[int, Counter[int]] = {}
    for d, n in zip(depth, kept, strict=True):
        counts.setdefault(d, Counter())[n] += 1
    return Acceptance(
        steps=len(records),
        drafted=sum(len(r.tokens) for r in records),
        accepted=sum(kept),
        emitted=sum(r.emitted for r in records),
        plain=plain,
        cut=sum(r.emitted <= len(r.accepted) for r in records),
        survivors=tuple(sum(n > i for n in kept) for i in range(max(depth, default=0))),
        histogram={d: tuple(c[n] for n in range(d + 1)) for d, c in sorted(counts.items())},
        expected_sum=sum(expected),
        expected_n=len(expected),
        mismatch_sum=_mismatch(records),
    )


def from_events(events: Iterable[Event]) -> Acceptance:
    """Statistics of an event stream: drafts of its steps, *plain* tokens of its requests."""
    events = tuple(events)
    records = [d for e in events if isinstance(e, StepEvent) for d in e.drafts]
    tokens = [t for e in events if isinstance(e, RequestEvent) for t in e.tokens]
    return acceptance(records, plain=sum(t.source == "plain" for t in tokens))


def by_source(records: Iterable[DraftRecord]) -> dict[str, Acceptance]:
    """Statistics per drafter, by its name."""
    groups: dict[str, list[DraftRecord]] = {}
    for record in records:
        groups.setdefault(record.source, []).append(record)
    return {source: acceptance(group) for source, group in sorted(groups.items())}


def _kept(record: DraftRecord) -> int:
    # The path comes before the model's own token, so what was emitted is cut from the end.
    return min(len(record.accepted), record.emitted)


def _expected(record: DraftRecord) -> tuple[float, ...]:
    """Chances of the nodes tried where the emitted tokens came from: what ended the block hides the rest.

    Verification walks down the accepted path and tries siblings in order: all of them where it stopped, else
    those up to the one it took. A lossy rule looks at all branches of a tree at once: they all count.
    """
    branches = record.mismatch is not None and len(set(record.parents)) < len(record.parents)
    if branches or record.emitted > len(record.accepted):
        return record.expected
    tried, at = 0, -1
    for node in record.accepted[: record.emitted]:
        tried += sum(parent == at for parent in record.parents[: node + 1])
        at = node
    return record.expected[:tried]


def _mismatch(records: tuple[DraftRecord, ...]) -> float | None:
    lossy = [r for r in records if r.mismatch is not None]
    return sum(sum(r.mismatch[: _kept(r)]) for r in lossy if r.mismatch) if lossy else None


def _depths(parents: tuple[int, ...]) -> list[int]:
    out: list[int] = []
    for p in parents:
        out.append(1 if p < 0 else out[p] + 1)
    return out
