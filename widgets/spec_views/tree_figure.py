"""Draft trees and their masks as a plotly figure, which also works on an exported page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.widgets import figures
from workbench.widgets.palette import INKS, SOURCES, B, Theme

if TYPE_CHECKING:
    from workbench.widgets.spec_views.draft_tree import Round

MOST = 24  # rounds in a figure, the latest
_GREY = "#8a929c"
# state: name, colour, symbol, width of the outline
STATES = {
    "root": ("committed before", SOURCES["plain"], "circle", 1),
    "accepted": ("accepted", SOURCES["accepted"], "square", 1),
    "bonus": ("bonus", SOURCES["bonus"], "diamond", 1),
    "corrected": ("corrected", SOURCES["corrected"], "diamond-open", 2),
    "cut": ("cut off", _GREY, "square-open-dot", 2),
    "rejected": ("rejected", _GREY, "x-thin", 2),
    "untried": ("never judged", _GREY, "circle-open", 1),
}


def tree_figure(title: str, rounds: Sequence[Round], theme: Theme) -> Any:
    """A slider over rounds; left the tree, right what each node sees."""
    from workbench.widgets.spec_views.draft_tree import shown

    out = figures.new(title, theme=theme)
    out.set_subplots(rows=1, cols=2, column_widths=[0.7, 0.3], horizontal_spacing=0.05)
    ink, drawn = INKS[theme], rounds[-MOST:]
    first = max(range(len(drawn)), key=lambda i: sum(n.state == "accepted" for n in drawn[i].nodes))
    states = [s for s in STATES if any(n.state == s for r in drawn for n in r.nodes)]
    each = 2 + len(states)
    for number, r in enumerate(drawn):
        visible = number == first
        for kept, dash, colour in ((True, "solid", SOURCES["accepted"]), (False, "dot", _GREY)):
            x, y = _edges(r, kept)
            out.add_scatter(
                x=x, y=y, mode="lines", line={"color": colour, "width": 2 if kept else 1, "dash": dash},
                hoverinfo="skip", showlegend=False, visible=visible, row=1, col=1,
            )  # fmt: skip
        for state in states:
            name, colour, symbol, width = STATES[state]
            mine = [n for n in r.nodes if n.state == state]
            out.add_scatter(
                x=[n.depth for n in mine], y=[n.line for n in mine], mode="markers+text", name=name,
                text=[shown(n.text, 9) for n in mine], textposition="top center",
                textfont={"size": 11, "color": _GREY if state in ("rejected", "untried") else ink["text"]},
                marker={
                    "color": colour, "symbol": symbol, "size": 9, "line": {"width": width, "color": colour},
                },
                customdata=[n.words for n in mine], hovertemplate="%{customdata}<extra></extra>",
                legendgroup=state, visible=visible, row=1, col=1,
            )  # fmt: skip
        out.add_heatmap(
            z=[[int(seen) for seen in row] for row in r.mask], zmin=0, zmax=1, xgap=1, ygap=1,
            colorscale=[[0, ink["grid"]], [1, B]], showscale=False, visible=visible, row=1, col=2,
            hovertemplate="row %{y} sees row %{x}: %{z}<extra></extra>",
        )  # fmt: skip
    deep = max(n.depth for r in drawn for n in r.nodes)
    lines = max(n.line for r in drawn for n in r.nodes)
    clean = {"showgrid": False, "zeroline": False, "linecolor": ink["axis"], "tickcolor": ink["axis"]}
    out.update_xaxes(**clean, dtick=max(1, deep // 12), range=[-0.6, deep + 0.6], title="depth", row=1, col=1)
    out.update_yaxes(visible=False, range=[lines + 0.5, -0.9], row=1, col=1)
    out.update_xaxes(**clean, showticklabels=False, ticks="", title="sees the root and nodes", row=1, col=2)
    out.update_yaxes(**clean, showticklabels=False, ticks="", autorange="reversed", row=1, col=2)
    out.update_yaxes(scaleanchor="x2", scaleratio=1, constrain="domain", row=1, col=2)
    out.update_xaxes(constrain="domain", row=1, col=2)
    high = 190 + min(max(34 * (lines + 1), 130), 480)
    out.update_layout(height=high, margin={"b": 56, "t": 72})
    if len(drawn) > 1:
        _add_slider(out, drawn, each + 1, first, ink)
    return out


def _edges(r: Round, kept: bool) -> tuple[list[float | None], list[float | None]]:
    x: list[float | None] = []
    y: list[float | None] = []
    for node in r.nodes[1:]:
        if (node.state in ("accepted", "bonus", "corrected")) == kept:
            parent = r.nodes[node.parent]
            x += [parent.depth, node.depth, None]
            y += [parent.line, node.line, None]
    return x, y


def _add_slider(out: Any, drawn: Sequence[Round], each: int, first: int, ink: dict[str, str]) -> None:
    total = each * len(drawn)
    steps = [
        {
            "method": "restyle",
            "args": [{"visible": [i // each == n for i in range(total)]}],
            "label": r.words,
        }
        for n, r in enumerate(drawn)
    ]
    slider = {
        "active": first, "steps": steps, "pad": {"t": 60}, "ticklen": 3, "tickcolor": ink["axis"],
        "currentvalue": {"prefix": "", "xanchor": "left", "font": {"size": 12, "color": ink["text"]}},
        "font": {"size": 1, "color": "rgba(0,0,0,0)"}, "bgcolor": ink["grid"],
        "bordercolor": ink["axis"], "activebgcolor": B,
    }  # fmt: skip
    out.update_layout(sliders=[slider], height=out.layout.height + 88)
    out.layout.margin.b += 88
