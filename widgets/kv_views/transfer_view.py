"""How does a stored context arrive? CacheGen's chunks on a link whose bandwidth the slider sets.

Bytes of every chunk and level, seconds of decoding them and of computing a chunk from its text are measured
on this machine (seconds: the median chunk's); the link and its clock are *simulated*. The policy knows only
what the chunks before took.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.core.bound import attention_op
from workbench.core.build import standalone_engine
from workbench.core.build_weights import weights_key
from workbench.core.cachegen_calibration import cachegen_artefact
from workbench.core.cachegen_transfer import store_context
from workbench.core.quality import quality_plans
from workbench.core.quality_windows import QualitySettings
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.context import CHUNK
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import LEVELS, Level
from workbench.kv.cachegen.link import BandwidthTrace, random_drops
from workbench.kv.cachegen.policy import TEXT, Adaptive, Fixed, Offer, Policy
from workbench.kv.cachegen.transfer import Transfer, simulate, summary
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.widgets import words
from workbench.widgets.lanes import Box, Frame, Kind, Lanes
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

STEPS = 9  # bandwidths on the slider
_LOOKS = (("#2f7fd1", ""), ("#12908e", "/"), ("#8a63c9", "\\"), ("#d9822b", "x"), ("#a08448", "+"))


@dataclass(frozen=True)
class TransferView:
    """``offers`` are the chunks of a context of ``tokens`` at ``levels``; ``slo`` seconds are allowed.

    ``factor`` > 1: the bandwidth falls to a ``factor``-th of itself at a third of the time allowed, for as
    long as the time allowed.
    """

    model: str
    tokens: int
    levels: tuple[str, ...]
    offers: tuple[Offer, ...]
    slo: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.offers or not self.slo > 0 or not self.factor >= 1:
            raise OptionError(
                f"{len(self.offers)} chunks in {self.slo} s, bandwidth ÷ {self.factor}.",
                hint="Store a context first; the time allowed is above 0, the factor at least 1.",
            )

    @property
    def rates(self) -> tuple[float, ...]:
        """Bandwidths of the slider, bytes per second: from far too little to more than plenty."""
        base = sum(o.sizes[0] for o in self.offers) / self.slo
        return tuple(base * 1.7 ** (i - 3) for i in range(STEPS))

    def transfer(self, rate: float, policy: Policy | None = None) -> Transfer:
        """The simulated transfer at ``rate`` bytes per second; the paper's policy by default."""
        return simulate(self.offers, self._trace(rate), policy or Adaptive(), self.slo)

    def lanes(self) -> Lanes:
        """Chunks on the link and at work, a frame for each bandwidth."""
        kinds = [
            Kind(_key(i), f"sent as {n} bins", *_LOOKS[i % len(_LOOKS)]) for i, n in enumerate(self.levels)
        ]
        kinds.append(Kind(_key(TEXT), "sent as text, computed here", "#7c8796", "."))
        frames = tuple(self._frame(rate) for rate in self.rates)
        drop = f", bandwidth ÷ {self.factor:g} for a while" if self.factor > 1 else ""
        note = (
            "Bytes and seconds of work measured here; the link and the clock are simulated. Numbers in boxes "
            "are chunks."
        )
        return Lanes(
            f"A context of {self.tokens:,} tokens of {self.model} arrives{drop} (simulated)",
            "ms since the request", ("link", "work here"), tuple(kinds), frames, STEPS // 2, "bandwidth",
            note,
        )  # fmt: skip

    def figure(self, theme: Theme = "auto") -> Any:
        """The timeline as a plotly figure with its slider."""
        return self.lanes().figure(theme)

    def live(self) -> Any:
        """The timeline with a slider that the keyboard moves."""
        return self.lanes().live()

    def table(self) -> Table:
        """For every bandwidth: what was chosen, when all was there, and what fixed levels would have done."""
        rows = []
        for rate in self.rates:
            t = self.transfer(rate)
            fixed = [self.transfer(rate, Fixed(i)) for i in range(len(self.levels))]
            rows.append(
                (
                    f"{rate / 1e6:.3g} MB/s", " ".join(self._chosen(c) for c in t.choices),
                    *(_seconds(x, self.slo) for x in (t, *fixed)), words.size(t.nbytes), "simulated",
                )
            )  # fmt: skip
        columns = ("bandwidth", "chosen", "adaptive", *(f"all {n}" for n in self.levels), "bytes", "tag")
        compute = 1e3 * sum(o.compute for o in self.offers)
        note = (
            f"Time allowed: {1e3 * self.slo:.0f} ms; ! is late. Levels count from 0, the least lossy; T is "
            f"text. Computing the whole context takes {compute:.0f} ms here (measured)."
        )
        return Table.of(columns, rows, note=note)

    def drops(self, links: int = 40, *, factor: float = 10.0, seed: int = 0) -> Table:
        """Links that fall to a ``factor``-th at a moment of their own: how often each policy is late."""
        rate = self.rates[STEPS - 2]
        span = (0.05 * self.slo, 0.6 * self.slo)
        traces = random_drops(
            rate, factor=factor, begin=span, seconds=(0.5 * self.slo, 2 * self.slo), n=links, seed=seed
        )
        policies: dict[str, Policy] = {
            "adaptive": Adaptive(),
            "adaptive, 30% in reserve": Adaptive(reserve=0.3),
        }
        policies |= {f"all {n}": Fixed(i) for i, n in enumerate(self.levels)}
        rows = []
        for name, policy in policies.items():
            told = {m.name: m for m in summary([simulate(self.offers, t, policy, self.slo) for t in traces])}
            seconds = told["load_seconds"]
            low, high = seconds.spread or (seconds.value, seconds.value)
            rows.append(
                (
                    name, f"{told['slo_violations'].value:.0f}%",
                    f"{1e3 * seconds.value:.0f} ms ({1e3 * low:.0f}–{1e3 * high:.0f})",
                    words.size(told["sent_bytes"].value), f"{told['text_chunks'].value:.0f}%", "simulated",
                )
            )  # fmt: skip
        fall = f"{links} links of {rate / 1e6:.3g} MB/s that fall to a {factor:g}th for a while"
        note = f"{fall}; {1e3 * self.slo:.0f} ms allowed; mean (lowest–highest)."
        return Table.of(("policy", "late", "time", "bytes", "chunks as text", "tag"), rows, note=note)

    # -- inside -----------------------------------------------------------------------------------------

    def _trace(self, rate: float) -> BandwidthTrace:
        if self.factor == 1:
            return BandwidthTrace.steady(rate)
        return BandwidthTrace.drop(rate, self.factor, self.slo / 3, self.slo)

    def _frame(self, rate: float) -> Frame:
        transfer = self.transfer(rate)
        boxes = []
        for i, (sent, offer) in enumerate(zip(transfer.sent, self.offers, strict=True), 1):
            name = self._named(sent.choice)
            work = offer.cost(sent.choice)[1]
            size = words.size(sent.nbytes)
            guess = "no estimate yet" if sent.estimate is None else f"estimate {sent.estimate / 1e6:.3g} MB/s"
            took = f"{1e3 * (sent.arrived - sent.begin):.1f} ms on the link"
            on_link = f"chunk {i} as {name}: {size}, {took}; {guess}"
            kind = _key(sent.choice)
            boxes.append(Box(0, 1e3 * sent.begin, 1e3 * sent.arrived, kind, str(i), on_link))
            did = "computed from text" if sent.choice == TEXT else "decoded"
            here = f"chunk {i} {did}: {1e3 * work:.1f} ms"
            boxes.append(Box(1, 1e3 * (sent.ready - work), 1e3 * sent.ready, kind, str(i), here))
        late = "late" if transfer.late else "in time"
        said = (
            f"{rate / 1e6:.3g} MB/s: all there after {1e3 * transfer.seconds:.0f} ms, {late} "
            f"({1e3 * self.slo:.0f} ms allowed), {words.size(transfer.nbytes)} sent"
        )
        return Frame(said, tuple(boxes), ((1e3 * self.slo, "allowed"),))

    def _named(self, choice: int) -> str:
        return "text" if choice == TEXT else self.levels[choice]

    def _chosen(self, choice: int) -> str:
        return "T" if choice == TEXT else str(choice)


def stream_context(
    session: Session,
    ids: Sequence[int],
    *,
    levels: Sequence[Level] = LEVELS,
    chunk: int = CHUNK,
    slo: float = 0.0,
    factor: float = 1.0,
) -> TransferView:
    """Store a context of the session's model and measure what each of its chunks costs here.

    ``slo`` is in seconds; 0 takes what leaves something to decide: 0.7 of computing the context, or twice
    what decoding it takes, whichever is longer. Raises what ``store_context`` raises.
    """
    settings = QualitySettings(context=len(ids) + 1, score=1, greedy=0)
    _, plan = quality_plans(session.plan, Recipe(), session.facts, settings)
    given = list(ids)

    def work(job: Job, _: Engine) -> Generator[None, None, tuple[Offer, ...]]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(plan, told, job.token)
        yield
        artefact = cachegen_artefact(
            decoder, lambda: attention_op(plan, decoder.config), model=str(plan.model),
            weights=weights_key(plan), levels=tuple(levels), progress=told, cancel=job.token,
        )  # fmt: skip
        yield
        codec = CacheGen(artefact, Layout(decoder.config), decoder.weights.fingerprint)
        engine = standalone_engine(plan, decoder)
        stored = store_context(
            engine, codec, given, levels=levels, chunk=chunk, progress=told, cancel=job.token
        )
        return stored.offers

    offers = typical(session.task("storing a context", work).result())
    if not slo:
        compute, decode = sum(o.compute for o in offers), sum(o.decode[0] for o in offers)
        slo = max(0.7 * compute, 2 * decode)
    names = tuple(level.name for level in levels)
    return TransferView(str(session.plan.model), len(given), names, offers, slo, factor)


def typical(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The same chunks with the median seconds of all whole ones: a slow moment of the machine is no plan."""
    whole = [o for o in offers if o.text == offers[0].text]
    decode = tuple(median(o.decode[i] for o in whole) for i in range(len(offers[0].decode)))
    compute = median(o.compute for o in whole)
    return tuple(
        replace(o, decode=decode, compute=compute) if o.text == offers[0].text else o for o in offers
    )


def _key(choice: int) -> str:
    return "text" if choice == TEXT else f"level {choice}"


def _seconds(transfer: Transfer, slo: float) -> str:
    return f"{1e3 * transfer.seconds:.0f} ms{' !' if transfer.seconds > slo else ''}"
