"""A panel without a front end: on a saved page, in a terminal, or without the widget packages."""

from __future__ import annotations

import html
from importlib import import_module
from typing import Any

from workbench.spec.errors import MissingExtra
from workbench.spec.install import install_line
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.widgets import figures, views


def bundle(recipe: Recipe, last: Run | None, missing: str = "") -> dict[str, Any]:
    """Mime forms of a panel: text, HTML with the latest numbers, and a figure where widgets are missing.

    ``missing``: the widget package that is not installed; the notice names it and how to get it.
    """
    if missing:
        how = f"Install it with: {install_line('lab')}"
        notice = f"The live panel needs the package {missing}, which is not installed. {how}"
    else:
        notice = "Run this cell to use the panel."
    lines = [f"Panel: {recipe}", *([views.to_table("latency", last).to_text()] if last is not None else [])]
    out: dict[str, Any] = {"text/plain": "\n".join([*lines, notice])}
    table = views.to_table("latency", last).to_html() if last is not None else ""
    out["text/html"] = (
        f"<p>Recipe: <b>{html.escape(str(recipe))}</b></p>{table}<p><em>{html.escape(notice)}</em></p>"
    )
    if missing and last is not None:
        try:
            figure = views.to_figure("memory", last)
        except MissingExtra:
            return out
        figures.add_note(figure, html.escape(notice))
        out[figures.MIME] = figure.to_plotly_json()
    return out


def default_store() -> Any:
    """The record store of this machine."""
    return import_module("workbench.records.store").RunStore()
