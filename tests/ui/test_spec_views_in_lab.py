"""Draft trees in a real JupyterLab: alone, with a slider that obeys the keyboard, and in the panel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 180_000  # ms: a kernel that imports torch on a busy machine
TREES = """
from workbench.core.session import Session
from workbench.spec.recipe import Recipe
from workbench.widgets.spec_views import read_rounds
session = Session("tiny", Recipe.of("paged", "suffix:tree=true"), dtype="float32")
run = session.generate("one two three one two three one two four one two", max_tokens=48, ignore_eos=True)
view = read_rounds(run).live()
view
"""
PANEL = """
from workbench.spec.recipe import Recipe
from workbench.widgets import Panel
panel = Panel("tiny", recipe=Recipe.of("paged", "ngram"), chat=False, prompt="one two one two one two one",
              sampling={"max_tokens": 48, "ignore_eos": True}, dtype="float32")
panel.run().wait()
panel
"""


def fits(page: Any, selector: str) -> bool:
    found: bool = page.evaluate(
        f"(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector({selector!r}))"
    )
    return found


def test_the_slider_steps_through_rounds_and_every_node_can_be_read(
    open_notebook: Callable[..., Any], shots: Path
) -> None:
    page = open_notebook(TREES, width=1000)
    view = page.locator(".iwb-lanes")
    view.wait_for(timeout=SLOW)
    slider, words = view.locator(".iwb-lanes-slider"), view.locator(".iwb-lanes-words")
    slider.focus()
    page.keyboard.press("Home")
    words.filter(has_text="round 1 of").wait_for(timeout=30_000)
    assert view.get_by_role("button", name="round: one back").is_disabled()
    page.keyboard.press("ArrowRight")
    words.filter(has_text="round 2 of").wait_for(timeout=30_000)
    view.locator("summary").focus()
    page.keyboard.press("Enter")
    view.locator("li").first.wait_for(timeout=30_000)
    told = view.locator("li").all_text_contents()
    assert len(told) == view.locator(".iwb-node").count() - 1  # all but the root
    assert all(line.startswith("depth ") for line in told)
    assert view.locator("svg.iwb-tree-canvas").get_attribute("aria-label") == words.text_content()
    rows = view.locator(".iwb-cell-on")
    assert rows.count() >= 2 * len(told)  # each sees the context and itself
    page.set_viewport_size({"width": 700, "height": 1100})
    page.wait_for_timeout(500)
    assert fits(page, ".iwb-lanes")
    page.screenshot(path=shots / "draft-tree.png")
    assert page.errors == []


def test_the_panel_draws_the_rounds_of_its_run(open_notebook: Callable[..., Any], shots: Path) -> None:
    page = open_notebook(PANEL)
    page.get_by_role("tab", name="Drafts", exact=True).click(timeout=SLOW)
    pane = page.locator(".iwb-drafts")
    pane.locator(".iwb-node-accepted").first.wait_for(timeout=60_000)
    assert pane.locator(".iwb-badge").text_content() == "exact"
    last = pane.locator(".iwb-lanes-words").text_content()
    pane.locator(".iwb-lanes-slider").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "w => document.querySelector('.iwb-drafts .iwb-lanes-words').textContent !== w", arg=last
    )
    for chart in ("kept, by draft position", "rounds, by kept tokens", "ms a round"):
        picture = pane.locator(f"svg[aria-label^='{chart}:']")
        assert picture.locator("rect").count() > 0
    assert fits(page, ".iwb-drafts")
    page.screenshot(path=shots / "panel-drafts.png")
    assert page.errors == []
