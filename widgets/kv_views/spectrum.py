"""Where does KVTC spend its bits? Variance of the joint components, and what each is stored as, by ratio.

From the calibration of the session's model. Components are in order of variance, so a good plan gives fp8 to
the first few, int4 and int2 to those behind, and drops the rest; the slider changes the budget. Sizes are
before entropy coding.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from workbench.core.bound import attention_op
from workbench.core.build_weights import weights_key
from workbench.core.kvtc_calibration import kvtc_calibration
from workbench.kv.kvtc.artefact import Artefact, Calibration
from workbench.kv.kvtc.basis import Basis
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.joint import JointRows
from workbench.kv.kvtc.plan import BitPlan
from workbench.spec.errors import OptionError
from workbench.widgets import clean, figures, words
from workbench.widgets.lanes import Box, Frame, Kind, Lanes
from workbench.widgets.palette import INKS, B, Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

Within = Literal["model", "layer", "head"]
RATIOS = (4.0, 8.0, 16.0, 32.0, 64.0)
DROPPED = "dropped"
KINDS = (
    Kind("fp8", "fp8, 8 bits", "#2f7fd1"),
    Kind("int4", "int4", "#12908e", "/"),
    Kind("int2", "int2", "#d9822b", "x"),
    Kind(DROPPED, "dropped", "#7c8796", ".", hollow=True, dash=True),
)
_SYMBOLS = {"fp8": "circle", "int4": "square", "int2": "diamond", DROPPED: "x-thin-open"}
_MOST = 130  # components drawn, evenly on the log axis


@dataclass(frozen=True)
class Spectrum:
    """A calibration with its plans by ratio, the same for keys and values."""

    model: str
    calibration: Calibration
    artefacts: dict[float, Artefact]
    joint: JointRows
    parameters: int

    def codec(self, ratio: float, **options: int) -> Kvtc:
        """The codec at a planned ratio; ``sinks`` and ``window`` are options.

        Raises :class:`OptionError` for a ratio that was not planned.
        """
        if ratio not in self.artefacts:
            planned = ", ".join(f"{r:g}" for r in self.artefacts)
            raise OptionError(f"There is no plan for {ratio:g}×.", hint=f"Planned: {planned}.")
        return Kvtc(self.artefacts[ratio], self.joint, self.calibration.model, **options)

    def stored(self, ratio: float, side: int) -> list[str]:
        """What every component is stored as; ``side`` 0: keys, 1: values."""
        basis = (self.calibration.k, self.calibration.v)[side][0]
        out = [DROPPED] * basis.rank
        for group in self._plan(ratio, side).groups:
            out[group.start : group.start + group.size] = [group.kind] * group.size
        return out

    def figure(self, theme: Theme = "auto") -> Any:
        """Share of the variance by component, both axes logarithmic; marks say what it is stored as."""
        out = figures.new(f"KVTC spectrum of {self.model}, and its bits (measured)", theme=theme)
        out.set_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04)
        first = self._first
        each = 2 * len(KINDS)
        for number, ratio in enumerate(self.artefacts):
            for side in (0, 1):
                self._marks(out, ratio, side, number == first)
        for col, name in ((1, "keys, before rotation"), (2, "values")):
            out.update_xaxes(type="log", dtick=1, title={"text": f"component of the {name}"}, col=col)
        out.update_yaxes(type="log", exponentformat="power", dtick=1)
        out.update_yaxes(title={"text": "share of the variance"}, col=1)
        total = each * len(self.artefacts)
        steps = [
            {
                "method": "restyle",
                "args": [{"visible": [i // each == n for i in range(total)]}],
                "label": self._words(ratio),
            }
            for n, ratio in enumerate(self.artefacts)
        ]
        ink = INKS[theme]
        slider = {
            "active": first, "steps": steps, "pad": {"t": 64}, "ticklen": 3, "tickcolor": ink["axis"],
            "currentvalue": {"prefix": "", "xanchor": "left", "font": {"size": 12, "color": ink["text"]}},
            "font": {"size": 1, "color": "rgba(0,0,0,0)"}, "bgcolor": ink["grid"],
            "bordercolor": ink["axis"], "activebgcolor": B,
        }  # fmt: skip
        out.update_layout(height=520, sliders=[slider], margin={"b": 56})
        return out

    def lanes(self) -> Lanes:
        """The same plans as boxes, a frame for each ratio: groups of components in order."""
        frames = []
        for ratio in self.artefacts:
            boxes: list[Box] = []
            for side, name in enumerate(("keys", "values")):
                at = 0
                plan, rank = self._plan(ratio, side), self.calibration.k[0].rank
                for g in plan.groups:
                    if g.start > at:
                        boxes.append(
                            Box(side, at, g.start, DROPPED, "", f"{name}: {_range(at, g.start)} dropped")
                        )
                    bits = f"{g.bits} bits a token, 32 of them shift and scale"
                    said = f"{name}: {_range(g.start, g.start + g.size)} as {g.kind}, {bits}"
                    boxes.append(Box(side, g.start, g.start + g.size, g.kind, g.kind, said))
                    at = g.start + g.size
                if at < rank:
                    boxes.append(Box(side, at, rank, DROPPED, "", f"{name}: all behind {at:,} dropped"))
            frames.append(Frame(self._words(ratio), tuple(boxes)))
        note = "Groups of 1, 16, 64, 256 or 1,024 components; a dynamic program chooses sizes and formats."
        return Lanes(
            f"Bits of KVTC on {self.model} (measured)", "component, in order of variance",
            ("keys", "values"), KINDS, tuple(frames), self._first, "ratio", note,
        )  # fmt: skip

    def live(self) -> Any:
        """The boxes with a slider that the keyboard moves."""
        return self.lanes().live()

    def table(self) -> Table:
        """Per ratio: bits of a token, components by format, error left, and bytes shared."""
        rows = []
        for ratio, artefact in self.artefacts.items():
            for side, name in enumerate(("keys", "values")):
                plan, kinds = self._plan(ratio, side), self.stored(ratio, side)
                counts = [kinds.count(k) for k in ("fp8", "int4", "int2", DROPPED)]
                energy = float((self.calibration.k, self.calibration.v)[side][1].energy.sum())
                size = words.size((artefact.k, artefact.v)[side].nbytes)
                rows.append(
                    (f"{ratio:g}×", name, plan.bits, *counts, f"{plan.error / energy:.2%}", size, "measured")
                )
        columns = (
            "ratio", "side", "bits a token", "fp8", "int4", "int2", "dropped", "error left", "basis", "tag",
        )  # fmt: skip
        c = self.calibration
        shares = "; ".join(f"{name} {_shares(b)}" for name, b in (("keys", c.k[0]), ("values", c.v[0])))
        note = (
            f"Variance: {shares}, of {len(c.k[0].mean):,}. Calibrated on {c.origin}. Error left: of the "
            "variance of held-out text, in the components that the calibration keeps. A basis is stored once."
        )
        return Table.of(columns, rows, note=note)

    def shared(self) -> Table:
        """What every decoder of the model needs once, and when it has paid for itself."""
        rows = []
        for ratio, artefact in self.artefacts.items():
            after = artefact.break_even(artefact.bits / 8)
            share = f"{artefact.nbytes / (2 * self.parameters):.1%}"
            rows.append((f"{ratio:g}×", words.size(artefact.nbytes), share, round(after), "measured"))
        columns = ("ratio", "bases and plans", "of the 16-bit parameters", "paid for after, tokens", "tag")
        note = "Paid for: stored tokens whose saving against 16-bit KV, before entropy coding, equals it."
        return Table.of(columns, rows, note=note)

    # -- inside -----------------------------------------------------------------------------------------

    @property
    def _first(self) -> int:
        return min(2, len(self.artefacts) - 1)

    def _plan(self, ratio: float, side: int) -> BitPlan:
        artefact = self.artefacts[ratio]
        return (artefact.k, artefact.v)[side].plan

    def _words(self, ratio: float) -> str:
        told = []
        for side, name in enumerate(("keys", "values")):
            kinds = self.stored(ratio, side)
            kept = ", ".join(f"{kinds.count(k)} {k}" for k in ("fp8", "int4", "int2") if k in kinds)
            told.append(f"{name}: {kept or 'nothing kept'}")
        return f"{ratio:g}× before entropy coding; " + "; ".join(told)

    def _marks(self, out: Any, ratio: float, side: int, visible: bool) -> None:
        basis = (self.calibration.k, self.calibration.v)[side][0]
        kinds, shown = self.stored(ratio, side), _evenly(basis.rank)
        for kind in KINDS:
            mine = [i for i in shown if kinds[i] == kind.key]
            share, _ = clean.series([_share(basis.variance, i, basis.total) for i in mine], log=True)
            out.add_scatter(
                x=[i + 1 for i in mine], y=share, mode="markers", name=kind.name, legendgroup=kind.key,
                showlegend=side == 0, visible=visible, row=1, col=side + 1,
                marker={"color": kind.colour, "symbol": _SYMBOLS[kind.key], "size": 6},
                hovertemplate=f"component %{{x}}: {kind.name}, %{{y:.2e}} of the variance<extra></extra>",
            )  # fmt: skip


def read_spectrum(
    session: Session, ratios: Sequence[float] = RATIOS, *, within: Within = "model"
) -> Spectrum:
    """Calibrate KVTC for the session's weights (minutes, once: it is remembered) and plan every ratio.

    ``within`` a layer, or a head: no component mixes more than its features; the toy that a basis of all is
    compared with. Raises :class:`OptionError` without ratios or for one below 2, and what
    :func:`kvtc_calibration` raises.
    """
    if not ratios:
        raise OptionError("There is no ratio to plan for.", hint="For example 8, 16 and 32.")
    plan, joint = session.plan, JointRows(session.facts.config)
    block = {"model": None, "layer": joint.width, "head": joint.dim}[within]

    def work(job: Job, _: Engine) -> Generator[None, None, tuple[Calibration, dict[float, Artefact], int]]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(plan, told, job.token)
        yield
        calibration = kvtc_calibration(
            decoder, lambda: attention_op(plan, decoder.config), model=str(plan.model),
            weights=weights_key(plan), block=block, progress=told, cancel=job.token,
        )  # fmt: skip
        artefacts = {}
        for ratio in ratios:
            yield
            artefacts[float(ratio)] = calibration.artefact(ratio, ratio)
        return calibration, artefacts, decoder.weights.nbytes() // decoder.weights.dtype.itemsize

    calibration, artefacts, parameters = session.task("calibrating KVTC", work).result()
    return Spectrum(str(plan.model), calibration, artefacts, joint, parameters)


def _shares(basis: Basis) -> str:
    found = []
    for share in (0.9, 0.99):
        rank = basis.rank_for(share)
        found.append(
            f"{share:.0%} in {rank:,}" if rank <= basis.rank else f"{share:.0%} in over {basis.rank:,}"
        )
    return ", ".join(found) + " components"


def _share(variance: Tensor, i: int, total: float) -> float:
    return float(f"{float(variance[i]) / total:.4g}") if total else 0.0


def _evenly(rank: int) -> list[int]:
    """At most ``_MOST`` of ``rank`` indices, evenly on a log axis, the first ones all."""
    if rank <= _MOST:
        return list(range(rank))
    return sorted({min(round(rank ** (i / (_MOST - 1))), rank) - 1 for i in range(_MOST)})


def _range(begin: int, end: int) -> str:
    return f"component {begin + 1:,}" if end - begin == 1 else f"components {begin + 1:,} to {end:,}"
