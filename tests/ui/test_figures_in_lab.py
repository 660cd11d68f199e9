"""Figures in a real JupyterLab: they keep the height they ask for when the window or the theme changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 180_000  # ms: a kernel on a busy machine
FIGURE = """
from workbench.widgets import figures
figure = figures.new("Two", x="x", y="y")
figure.set_subplots(rows=1, cols=2)
figure.add_scatter(x=[1, 2], y=[1, 2], row=1, col=1)
figure.add_scatter(x=[1, 2], y=[2, 1], row=1, col=2)
figure.update_layout(height=300)
figure
"""
SIZE = "(() => { const r = document.querySelector('.jp-RenderedPlotly .main-svg').getBoundingClientRect(); "
SIZE += "return [Math.round(r.width), Math.round(r.height)] })()"


def test_a_figure_keeps_its_height_when_window_and_theme_change(
    open_notebook: Callable[..., Any], shots: Path
) -> None:
    page = open_notebook(FIGURE, width=1200)
    page.locator(".jp-RenderedPlotly .main-svg").first.wait_for(timeout=SLOW)
    wide, high = page.evaluate(SIZE)
    assert high == 300
    for width in (900, 700):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_function(f"{SIZE}[0] < {wide - 100}", timeout=30_000)
        page.wait_for_timeout(1000)  # a resize is answered twice
        wide, high = page.evaluate(SIZE)
        assert high == 300
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached", timeout=60_000)
    page.wait_for_timeout(2000)
    assert page.evaluate(SIZE)[1] == 300
    page.screenshot(path=shots / "figure-dark.png")
    assert page.errors == []
