"""Boxes on lanes, frame by frame: pages of sequences, chunks on a link, components of a codec, kept tokens.

A picture of this kind is plain data, drawn twice: as a plotly figure with its slider, which also works on an
exported page, and live, with a slider that the keyboard moves. A kind of box has one colour and one hatching
everywhere, so that nothing is told by colour alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from workbench.spec.errors import OptionError
from workbench.widgets import figures
from workbench.widgets.palette import INKS, B, Theme

_WORDS = 20  # pixels for the words of a rule
_BOX = 0.76  # of a lane's height
Hatch = Literal["", "/", "\\", "x", "-", "|", "+", "."]


@dataclass(frozen=True)
class Kind:
    """What a box can be. ``hollow``: outline and hatching only; ``dash``: outline of what is not there."""

    key: str
    name: str
    colour: str
    hatch: Hatch = ""
    hollow: bool = False
    dash: bool = False


@dataclass(frozen=True)
class Box:
    """From ``start`` to ``end`` on a lane; ``label`` stands in it, ``words`` say everything about it."""

    lane: int
    start: float
    end: float
    kind: str
    label: str = ""
    words: str = ""


@dataclass(frozen=True)
class Frame:
    """One position of the slider, in ``words``; ``rules`` are vertical lines with what they mean."""

    words: str
    boxes: tuple[Box, ...]
    rules: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Lanes:
    """The picture. ``knob`` names the slider, ``first`` is the frame it opens at, ``x`` the axis with unit.

    Raises :class:`OptionError` for a picture without lanes or frames, or a box of an unknown kind or lane.
    """

    title: str
    x: str
    lanes: tuple[str, ...]
    kinds: tuple[Kind, ...]
    frames: tuple[Frame, ...]
    first: int = 0
    knob: str = "step"
    note: str = ""

    def __post_init__(self) -> None:
        if not self.lanes or not self.frames or not 0 <= self.first < len(self.frames):
            raise OptionError(f"{self.title}: there is nothing to draw.", hint="Run something first.")
        known = {k.key for k in self.kinds}
        for box in (b for f in self.frames for b in f.boxes):
            if box.kind not in known or not 0 <= box.lane < len(self.lanes):
                raise OptionError(f"{self.title}: a box of kind {box.kind!r} on lane {box.lane}.")

    @property
    def used(self) -> tuple[Kind, ...]:
        """The kinds that occur in any frame."""
        there = {b.kind for f in self.frames for b in f.boxes}
        return tuple(k for k in self.kinds if k.key in there)

    @property
    def end(self) -> float:
        """Where the longest lane ends."""
        ends = [b.end for f in self.frames for b in f.boxes] + [x for f in self.frames for x, _ in f.rules]
        return max(ends, default=1.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the front end: boxes as rows, kinds by number."""
        kinds = self.used
        number = {k.key: i for i, k in enumerate(kinds)}
        frames = [
            {
                "words": f.words,
                "boxes": [[b.lane, b.start, b.end, number[b.kind], b.label, b.words] for b in f.boxes],
                "rules": [list(r) for r in f.rules],
            }
            for f in self.frames
        ]
        return {
            "title": self.title, "x": self.x, "lanes": list(self.lanes), "end": self.end, "note": self.note,
            "kinds": [asdict(k) for k in kinds], "frames": frames, "first": self.first, "knob": self.knob,
        }  # fmt: skip

    def figure(self, theme: Theme = "auto") -> Any:
        """The plotly figure, with a slider when there are several frames."""
        out = figures.new(self.title, theme=theme, x=self.x, note=self.note)
        each = 0
        for number, frame in enumerate(self.frames):
            traces = self._traces(frame, INKS[theme])
            each = len(traces)
            for trace in traces:
                out.add_trace({**trace, "visible": number == self.first})
        ruled = any(
            f.rules for f in self.frames
        )  # their words stand above the top lane, the legend above them
        top = figures.TOP + _WORDS * ruled
        margin = {"l": 24 + 7 * max(map(len, self.lanes)), "t": top, "b": 56 + 24 * bool(self.note)}
        out.update_layout(barmode="overlay", height=top + self._tall + margin["b"], margin=margin)
        if ruled:
            out.update_layout(legend={"y": 1 + _WORDS / self._tall})
        out.update_xaxes(range=[0, self.end * 1.005], showgrid=False, zeroline=False)
        out.update_yaxes(
            categoryorder="array",
            categoryarray=list(self.lanes),
            showgrid=False,
            range=[len(self.lanes) - 0.5, -0.5],
        )
        if self.note:
            out.layout.annotations[0].update(y=0, yshift=-(54 + 78 * (len(self.frames) > 1)))
        if len(self.frames) > 1:
            out.update_layout(sliders=[self._slider(each, INKS[theme])], height=out.layout.height + 104)
            out.layout.margin.b += 104
        return out

    def live(self) -> Any:
        """The same as a widget whose slider the keyboard moves; raises ``MissingExtra`` without anywidget."""
        from workbench.widgets.lanes_live import LanesView

        return LanesView(self)

    @property
    def _tall(self) -> int:
        """Pixels of all lanes together."""
        return 78 + 34 * len(self.lanes)

    def _traces(self, frame: Frame, ink: dict[str, str]) -> list[dict[str, Any]]:
        traces: list[dict[str, Any]] = []
        for kind in self.used:
            boxes = [b for b in frame.boxes if b.kind == kind.key]
            clear = "rgba(0,0,0,0)"
            marker: dict[str, Any] = {
                "color": clear if kind.hollow and not kind.hatch else kind.colour,
                "line": {"color": kind.colour if kind.hollow else ink["axis"], "width": 1},
            }
            if kind.hatch:
                back = clear if kind.hollow else kind.colour
                fore = kind.colour if kind.hollow else "rgba(255,255,255,0.85)"
                marker["pattern"] = {
                    "shape": kind.hatch, "bgcolor": back, "fgcolor": fore, "size": 6, "solidity": 0.22,
                }  # fmt: skip
            traces.append(
                {
                    "type": "bar", "orientation": "h", "name": kind.name, "marker": marker, "width": _BOX,
                    "y": [self.lanes[b.lane] for b in boxes], "base": [b.start for b in boxes],
                    "x": [b.end - b.start for b in boxes], "text": [b.label for b in boxes],
                    "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
                    "textfont": {"color": ink["text"] if kind.hollow else "#ffffff", "size": 11},
                    "customdata": [b.words for b in boxes], "hovertemplate": "%{customdata}<extra></extra>",
                }
            )  # fmt: skip
        lines = {"x": [], "y": [], "text": []}  # type: dict[str, list[Any]]
        for x, words in frame.rules:
            lines["x"] += [x, x, None]
            lines["y"] += [self.lanes[-1], self.lanes[0], None]
            lines["text"] += ["", words, ""]
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers+text", "showlegend": False, **lines,
                "line": {"color": ink["axis"], "width": 1.5, "dash": "dash"},
                # Unseen, it holds the words off the boxes of the top lane.
                "marker": {"size": _BOX * self._tall / len(self.lanes), "opacity": 0},
                "textposition": "top center", "hoverinfo": "skip", "textfont": {"color": ink["text"]},
                "cliponaxis": False,
            }
        )  # fmt: skip
        return traces

    def _slider(self, each: int, ink: dict[str, str]) -> dict[str, Any]:
        total = each * len(self.frames)
        steps = [
            {
                "method": "restyle",
                "args": [{"visible": [i // each == number for i in range(total)]}],
                "label": frame.words,
            }
            for number, frame in enumerate(self.frames)
        ]
        return {
            "active": self.first,
            "steps": steps,
            "currentvalue": {"prefix": "", "xanchor": "left", "font": {"size": 12, "color": ink["text"]}},
            "font": {"size": 1, "color": "rgba(0,0,0,0)"},
            "pad": {"t": 60},
            "ticklen": 3,
            "tickcolor": ink["axis"],
            "bgcolor": ink["grid"],
            "bordercolor": ink["axis"],
            "activebgcolor": B,
        }
