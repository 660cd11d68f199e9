"""The one stream that everything visible is made from.

The engine emits a :class:`StepEvent` per iteration and a :class:`RequestEvent` per request
and step that produced tokens; a session adds :class:`JobEvent` s. All are plain data:
widgets, progress bars, plots and records are consumers, none of them is asked for by name.
Times are seconds of ``time.perf_counter`` unless a name says ``_ms``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

TokenSource = Literal["prompt", "plain", "accepted", "corrected", "bonus"]
FinishReason = Literal["stop", "length", "abort", "error"]
JobState = Literal["queued", "running", "done", "cancelled", "superseded", "failed"]
JobClass = Literal["live", "request", "task"]

PHASES = ("schedule", "draft", "prepare", "forward", "verify", "sample", "commit", "emit")


@dataclass(frozen=True)
class TokenInfo:
    """One committed token: where it came from, and what it cost.

    ``source``: *plain* (sampled without a draft), *accepted* (drafted and kept), *corrected*
    (sampled where a draft was rejected), *bonus* (sampled after a fully accepted draft).
    ``logprob`` is the model's log-probability (before temperature and filters), in nats.
    """

    id: int
    position: int
    source: TokenSource
    step: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class DraftRecord:
    """One verified draft of one sequence: the tree, the verdict, the counts.

    ``expected`` and ``mismatch`` as in the verdict; ``mismatch`` is None for exact rules. ``root`` is the
    token the tree hangs below, ``own`` the model's own behind what was kept (it may have been cut off).
    ``chances``: what the drafter gave each node, given its parent; empty where it does not say. ``exit``: the
    target's own layer behind which it was drafted; 0 where something else drafts.
    """

    request_id: str
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: int
    source: str
    rule: str
    expected: tuple[float, ...] = ()
    mismatch: tuple[float, ...] | None = None
    root: int | None = None
    own: int | None = None
    chances: tuple[float, ...] = ()
    exit: int = 0


@dataclass(frozen=True)
class StepEvent:
    """One engine iteration.

    ``rows`` counts tokens forwarded (``prefill`` + ``decode`` + ``draft``); ``phase_ms`` splits
    wall-clock by :data:`PHASES`; ``bytes`` is memory by category as held at the end of the step, ``peak``
    (when something ended in it) as held just before the pages of what ended went back;
    ``path`` names the code really taken (attention form, kernels, codec). ``cold``: what the cold tier has
    done since it was made, and holds (``workbench.engine.cold.ColdTier.report``); ``warnings``: new ones.
    """

    step: int
    time: float
    rows: int
    prefill: int
    decode: int
    draft: int
    running: int
    waiting: int
    phase_ms: Mapping[str, float]
    pages_used: int
    pages_cached: int
    pages_free: int
    bytes: Mapping[str, int]
    drafts: tuple[DraftRecord, ...] = ()
    preempted: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    peak: Mapping[str, int] = field(default_factory=dict)
    cold: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def total_ms(self) -> float:
        """Wall-clock of the step, host overhead included."""
        return sum(self.phase_ms.values())


@dataclass(frozen=True)
class RequestEvent:
    """What one request gained in one step; ``text`` is final: it is never taken back."""

    request_id: str
    step: int
    time: float
    tokens: tuple[TokenInfo, ...] = ()
    text: str = ""
    sample: int = 0
    cached_tokens: int | None = None
    finish: FinishReason | None = None
    error: Mapping[str, str] | None = None


@dataclass(frozen=True)
class JobEvent:
    """State and progress of a job, ``done`` of ``total`` in ``unit``; ``error`` as in ``WorkbenchError``."""

    job_id: str
    kind: JobClass
    state: JobState
    label: str = ""
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    message: str = ""
    error: Mapping[str, str] | None = None


Event = StepEvent | RequestEvent | JobEvent

KV_IN_USE = ("kv_payload", "kv_meta", "fragmentation")
"""Categories that live sequences hold of the KV pool: their tokens, and what their slots leave empty."""


def fullest(steps: Iterable[StepEvent]) -> Mapping[str, int] | None:
    """Bytes by category when live sequences held most of the KV pool; None without steps.

    Payload alone would not do: a codec that shrinks a full page opens a fresh one beside it, and then holds
    more bytes with less payload. It decides between equals, as when a whole context is reserved at once.
    """
    held = (s.peak or s.bytes for s in steps)
    return max(
        held, key=lambda b: (sum(b.get(k, 0) for k in KV_IN_USE), b.get("kv_payload", 0)), default=None
    )
