"""A context streamed over a simulated link: real sizes, measured costs, a virtual clock.

Chunks follow each other on the link without gaps. Decoding, or computing from text, is done here one chunk
after the other, while the next is on its way (section 5.3 of the paper). Everything that comes out is
*simulated* and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.kv.cachegen.link import BandwidthTrace
from workbench.kv.cachegen.policy import TEXT, Offer, Policy, Situation
from workbench.spec.errors import OptionError
from workbench.spec.run import Metric


@dataclass(frozen=True)
class Sent:
    """One chunk: what was chosen, from which estimate (bytes per second), and when (seconds).

    It left at ``begin``, was here at ``arrived``, and its KV could be read at ``ready``.
    """

    choice: int
    nbytes: int
    estimate: float | None
    begin: float
    arrived: float
    ready: float

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second it came with: the next chunk's estimate."""
        seconds = self.arrived - self.begin
        return self.nbytes / seconds if seconds > 0 and self.nbytes else None


@dataclass(frozen=True)
class Transfer:
    """A simulated transfer of a whole context."""

    sent: tuple[Sent, ...]
    slo: float

    @property
    def seconds(self) -> float:
        """From the request until all KV can be read."""
        return self.sent[-1].ready

    @property
    def late(self) -> bool:
        """Whether the objective was missed."""
        return self.seconds > self.slo

    @property
    def nbytes(self) -> int:
        """Bytes sent."""
        return sum(s.nbytes for s in self.sent)

    @property
    def choices(self) -> tuple[int, ...]:
        """A level, or :data:`TEXT`, for every chunk."""
        return tuple(s.choice for s in self.sent)


def simulate(offers: Sequence[Offer], trace: BandwidthTrace, policy: Policy, slo: float) -> Transfer:
    """Stream chunks in order; ``slo`` is in seconds from the request until the last chunk is ready.

    Raises :class:`OptionError` for no chunks, or an objective that is not positive.
    """
    if not offers or not slo > 0:
        raise OptionError(f"Nothing can be streamed: {len(offers)} chunks within {slo} s.")
    sent: list[Sent] = []
    now = busy = 0.0
    estimate: float | None = None
    for i, offer in enumerate(offers):
        choice = policy.choose(Situation(tuple(offers[i:]), now, busy, estimate, slo))
        nbytes, work = offer.cost(choice)
        arrived = trace.finish(now, nbytes)
        busy = max(busy, arrived) + work
        sent.append(Sent(choice, nbytes, estimate, now, arrived, busy))
        estimate = sent[-1].bandwidth or estimate
        now = arrived
    return Transfer(tuple(sent), slo)


def summary(transfers: Sequence[Transfer]) -> list[Metric]:
    """Over several simulated transfers: share that came late, seconds, bytes, share of chunks as text."""
    n = len(transfers)
    if not n:
        return []
    seconds = sorted(t.seconds for t in transfers)
    chunks = [c for t in transfers for c in t.choices]
    load = sum(seconds) / n
    return [
        _simulated("slo_violations", 100 * sum(t.late for t in transfers) / n, "%", n),
        replace(_simulated("load_seconds", load, "s", n), spread=(seconds[0], seconds[-1])),
        _simulated("sent_bytes", sum(t.nbytes for t in transfers) / n, "B", n),
        replace(_simulated("text_chunks", 100 * chunks.count(TEXT) / len(chunks), "%", n), better=""),
    ]


def _simulated(name: str, value: float, unit: str, n: int) -> Metric:
    return Metric(name, value, unit, tag="simulated", n=n, better="lower")
