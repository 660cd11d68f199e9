"""A training in a real JupyterLab: begun and stopped by keyboard, its curve growing, in light and in dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 300_000  # ms: a kernel that imports torch and makes text on a busy machine
CELL = """
from workbench.training.heads.eagle import EagleShape
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import open_target
from workbench.widgets.spec_views import HeadTraining, own_cache
cache = own_cache()
data, schedule = DataSettings(tokens=300, questions=4), Schedule(steps=400, batch=4, look_every=2)
training = HeadTraining(open_target("tiny", dtype="float32"), data, EagleShape(steps=2, vocab=512), schedule)
training.live()
"""


def test_it_is_begun_and_stopped_by_keyboard_and_draws_what_it_learns(
    open_notebook: Callable[..., Any], shots: Path
) -> None:
    page = open_notebook(CELL, width=1000)
    start, go, stop = (
        page.locator("button.jupyter-button", has_text=name) for name in ("start", "go on", "stop")
    )
    start.wait_for(timeout=SLOW)
    assert stop.is_disabled()
    start.focus()
    page.keyboard.press("Enter")
    curve = page.locator("svg[aria-label^='first k drafts all right']")
    curve.wait_for(timeout=SLOW)
    assert curve.locator("polyline").count() == 2
    stop.focus()
    page.keyboard.press("Enter")
    words = page.locator("[role=status]")
    words.filter(has_text="stopped at step").wait_for(timeout=SLOW)
    assert not go.is_disabled() and stop.is_disabled()
    page.screenshot(path=shots / "head-training-light.png")
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached", timeout=60_000)
    colour = "e => getComputedStyle(e.querySelector('text')).fill"
    assert curve.evaluate(colour) != "rgb(0, 0, 0)"  # it follows the page
    page.screenshot(path=shots / "head-training-dark.png")
    assert page.errors == []
