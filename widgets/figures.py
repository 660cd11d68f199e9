"""How figures look: themes, line styles with one meaning each, and plotly, imported when it is needed.

``theme``: *auto* is transparent with text that reads on light and dark pages, for notebooks; *light* and
*dark* bring their own background, for export. Measured is a solid line, predicted a long dash, claimed an
open marker.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cache
from typing import Any, Literal

from workbench.spec.errors import MissingExtra, OptionError
from workbench.spec.run import Tag
from workbench.widgets.palette import INKS, Theme

MIME = "application/vnd.plotly.v1+json"
TOP = 72  # pixels above a plot: the mode bar and the title beside it, then two rows of a legend
_WITHOUT = ("sendChartToCloud", "zoomIn2d", "zoomOut2d", "autoScale2d", "select2d", "lasso2d")
# Not "responsive": JupyterLab fits figures itself, and together they forget the height a figure asks for.
_CONFIG = {"displaylogo": False}
_HEAVY = "plotly_mimetype+notebook"  # plotly's default in a notebook
DASH: dict[Tag, str] = {"measured": "solid", "predicted": "longdash", "simulated": "dot", "claimed": "solid"}


def plotly(module: str = "graph_objects") -> Any:
    """A plotly module, or :class:`MissingExtra` with the install line."""
    try:
        return importlib.import_module(f"plotly.{module}")
    except ImportError:
        raise MissingExtra("plotly", "lab", "Drawing a figure") from None


@cache
def figure_class() -> Any:
    """``plotly.graph_objects.Figure`` that shows itself as plotly's mime type, and as nothing else.

    Plotly's own way imports a validator of every JSON format first, more than a second of the first picture,
    and by default also writes its script, millions of bytes, into every notebook that draws. A renderer that
    somebody chose is used; ``show()`` is plotly's own.
    """

    class Figure(plotly().Figure):  # type: ignore[misc]
        _ipython_display_ = _repr_html_ = None  # they would come before, or beside, the mime form

        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None, **more: Any) -> Any:
            chosen = "PLOTLY_RENDERER" in os.environ or "plotly.io._renderers" in sys.modules
            if chosen and importlib.import_module("plotly.io").renderers.default != _HEAVY:
                return super()._repr_mimebundle_(include, exclude, **more)
            # Its own text form spells out every number of the figure.
            title = self.layout.title.text or "without a title"
            data = {**json.loads(self.to_json(validate=False)), "config": _CONFIG}
            return {MIME: data, "text/plain": f"Figure: {title}"}

    return Figure


def new(title: str, *, theme: Theme = "auto", x: str = "", y: str = "", note: str = "") -> Any:
    """An empty figure in a theme; ``x`` and ``y`` are axis titles with their units, ``note`` stands below."""
    if theme not in INKS:
        raise OptionError(f"theme = {theme!r} is unknown.", hint=f"Choose one of {', '.join(INKS)}.")
    ink = INKS[theme]
    axis = {
        "title": {"standoff": 15},
        "showgrid": True,
        "showline": True,  # a colour in a template does not imply it
        "gridcolor": ink["grid"],
        "linecolor": ink["axis"],
        "zerolinecolor": ink["axis"],
        "ticks": "outside",
        "tickcolor": ink["axis"],
        "automargin": True,
    }
    figure = figure_class()(
        layout={
            "title": {
                "text": title, "x": 0, "xref": "paper", "font": {"size": 15},
                "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8},
            },
            "modebar": {
                "remove": _WITHOUT, "bgcolor": "rgba(0,0,0,0)",
                "color": ink["axis"], "activecolor": ink["text"],
            },
            "font": {
                "color": ink["text"],
                "size": 12,
                "family": "system-ui, -apple-system, Segoe UI, sans-serif",
            },
            "paper_bgcolor": ink["page"],
            "plot_bgcolor": ink["page"],
            "margin": {"l": 56, "r": 24, "t": TOP, "b": 64 if note else 48},
            "height": 324,
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
            "hoverlabel": {"namelength": -1},
            "template": {"layout": {"xaxis": axis, "yaxis": axis}, "data": _data()},
        }
    )  # fmt: skip
    if note:
        add_note(figure, note)
    return figure


def _data() -> dict[str, Any]:
    """Defaults of traces: hatches lie over their colour, colour bars have no frame.

    A template of one's own replaces plotly's; without any, plotly puts its own in, with white grids.
    """
    hatch = {"fillmode": "overlay", "size": 10, "solidity": 0.2}
    bare = {"colorbar": {"outlinewidth": 0, "ticks": ""}}
    return {
        "bar": [{"marker": {"pattern": hatch}}],
        "scatter": [{"fillpattern": hatch}],
        "heatmap": [bare],
        "contour": [bare],
    }


def add_note(figure: Any, text: str) -> None:
    """A sentence below the plot: what was left out, where numbers come from."""
    figure.add_annotation(
        text=text,
        xref="paper",
        yref="paper",
        x=0,
        y=-0.24,
        showarrow=False,
        xanchor="left",
        font={"size": 11},
    )


def line(tag: Tag, colour: str, width: float = 2.0) -> dict[str, Any]:
    """Line style of a number's tag."""
    return {"color": colour, "width": width, "dash": DASH[tag]}


def marker(tag: Tag, colour: str) -> dict[str, Any]:
    """Marker style of a number's tag: open for claims."""
    return {"color": colour, "size": 7, "symbol": "circle-open" if tag == "claimed" else "circle"}


Barmode = Literal["stack", "group", "overlay"]
