"""The training of a head on screen: a bar, the curve as it grows, stop and go on; works with the keyboard."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from workbench.spec.errors import MissingExtra
from workbench.widgets.spec_views.head_training import COLOURS, HeadTraining

try:
    import ipywidgets as w
except ImportError:
    raise MissingExtra("ipywidgets", "lab", "A live view") from None

WIDTH, HEIGHT = 520, 160
_LEFT, _BOTTOM = 40, 22


def watching(training: HeadTraining) -> Any:
    """A box that follows ``training``; where no widget can be shown, its state stands in its place."""
    return Watching(training)


class Watching(w.VBox):  # type: ignore[misc]
    """Bar, words, buttons and curve of one training."""

    def __init__(self, training: HeadTraining) -> None:
        self._training = training
        self._bar = w.FloatProgress(value=0.0, max=1.0, layout={"width": f"{WIDTH}px"})
        self._words, self._curve = w.HTML(), w.HTML()
        self._stop = w.Button(description="stop", icon="stop", tooltip="Stop between two steps; all is kept")
        self._go = w.Button(description="go on", icon="play", tooltip="Begin, or go on where it was stopped")
        self._stop.on_click(lambda _: training.stop())
        self._go.on_click(lambda _: training.start())
        super().__init__([w.HBox([self._stop, self._go]), self._bar, self._words, self._curve])
        training.listen(self.refresh)
        self.refresh()

    def refresh(self) -> None:
        """Show where the training is."""
        t = self._training
        self._bar.value = 1.0 if t.state == "done" else t.fraction
        self._bar.bar_style = {"done": "success", "failed": "danger", "stopped": "warning"}.get(t.state, "")
        said = f'<span role="status">{html.escape(t.words)}</span>'
        if said != self._words.value:
            self._words.value = said
        self._stop.disabled = t.state != "running"
        self._go.description = "start" if t.state == "idle" else "go on"
        self._go.disabled = t.state in ("running", "done")
        picture = drawing([{n: float(v) for n, v in p.items()} for p in t.curve])
        if picture != self._curve.value:
            self._curve.value = picture

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**data, "text/plain": f"Training: {self._training.words}"}


def drawing(curve: Sequence[dict[str, float]]) -> str:
    """The curve as a picture of its own, in the page's colours: it is drawn again with every point."""
    names = [n for n in (curve[-1] if curve else {}) if n.startswith("right_")]
    if not names:
        return ""
    most = max(p["tokens"] for p in curve) or 1.0
    high = max(0.1, *(p[n] for p in curve for n in names))
    ink = "var(--jp-ui-font-color1, currentColor)"

    def at(point: dict[str, float], name: str) -> str:
        x = _LEFT + (WIDTH - _LEFT - 70) * point["tokens"] / most
        y = (HEIGHT - _BOTTOM - 16) * (1 - point[name] / high) + 16
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<line x1="{_LEFT}" x2="{WIDTH - 70}" y1="{HEIGHT - _BOTTOM}" y2="{HEIGHT - _BOTTOM}" '
        f'stroke="{ink}" stroke-opacity="0.4"/>',
        _text(0, 20, f"{high:.0%}", ink),
        _text(_LEFT, 10, "first k drafts all right, on held-out text", ink),
        _text(0, HEIGHT - _BOTTOM, "0%", ink),
        _text(_LEFT, HEIGHT - 4, f"0 … {most:,.0f} predictions learnt from", ink),
    ]
    for name, colour in zip(names, COLOURS, strict=False):
        line = " ".join(at(p, name) for p in curve)
        x, y = at(curve[-1], name).split(",")
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>']
        parts.append(_text(float(x) + 7, float(y) + 4, f"k = {name[6:]}: {curve[-1][name]:.0%}", ink))
    label = "first k drafts all right on held-out text: " + ", ".join(
        f"{n[6:]}: {curve[-1][n]:.0%}" for n in names
    )
    return (
        f'<svg role="img" aria-label="{label}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, said: str, ink: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" fill="{ink}">{html.escape(said)}</text>'
