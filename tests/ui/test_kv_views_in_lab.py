"""The film of page tables in a real JupyterLab: its slider obeys the keyboard, its boxes are text as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 180_000  # ms: a kernel that imports torch on a busy machine
FILM = """
from workbench.core.session import Session
from workbench.spec.recipe import Recipe
from workbench.widgets.kv_views import watch_pages
session = Session("tiny", Recipe.of("paged:page_size=16"))
with watch_pages(session) as film:
    session.generate(list(range(3, 55)), n=3, max_tokens=20, temperature=0.8, ignore_eos=True)
view = film.live()
view
"""


def test_the_slider_moves_by_keyboard_and_every_box_can_be_read(
    open_notebook: Callable[..., Any], shots: Path
) -> None:
    page = open_notebook(FILM, width=1000)
    view = page.locator(".iwb-lanes")
    view.wait_for(timeout=SLOW)
    words = view.locator(".iwb-lanes-words")
    words.filter(has_text="step 2: sequence 1 copies page 4 to 5").wait_for(timeout=30_000)
    view.locator(".iwb-lanes-slider").focus()
    page.keyboard.press("ArrowLeft")
    words.filter(has_text="sequence 2 shares pages 1–4").wait_for(timeout=30_000)
    assert view.get_by_role("button", name="engine step: one back").is_disabled()
    view.get_by_role("button", name="engine step: one on").click()
    words.filter(has_text="copies page 4").wait_for(timeout=30_000)
    view.locator("summary").focus()
    page.keyboard.press("Enter")
    lines = view.locator("li")
    lines.first.wait_for(timeout=30_000)
    told = lines.all_text_contents()
    assert "sequence 1: page 5: 5 of 16 slots filled" in told
    assert sum(line.startswith("sequence 2: page 1: 16 of 16 slots filled, shared") for line in told) == 1
    assert view.locator("svg.iwb-lanes-canvas").get_attribute("aria-label").startswith("Page tables")
    page.set_viewport_size({"width": 700, "height": 1100})
    page.wait_for_timeout(500)
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector('.iwb-lanes'))")
    page.screenshot(path=shots / "page-film.png")
    assert page.errors == []
