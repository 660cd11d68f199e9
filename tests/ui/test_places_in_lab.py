"""Two processes in a real JupyterLab: started, held back, killed; the text goes on. In light and in dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 180_000  # ms: a kernel that imports torch, and a process that does, on a busy machine
LIVE = """
from workbench.core.session import Session
from workbench.spec.plan import EngineLimits
from workbench.widgets.spec_views import PlacesLive
session = Session("tiny", dtype="float32", limits=EngineLimits(kv_pool_tokens=512, max_context=512))
live = PlacesLive(session, "mirror_sd:layers=4,k=2,wait=5000", "class Reader:", tokens=300)
live
"""


def test_a_drafter_is_killed_by_a_click_and_the_text_goes_on(
    open_notebook: Callable[..., Any], shots: Path
) -> None:
    page = open_notebook(LIVE, width=1000)
    page.get_by_role("button", name="Start", exact=True).click(timeout=SLOW)
    state = page.get_by_role("status")
    slider = page.get_by_role("slider")
    slider.focus()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    state.filter(has_text="drafts").wait_for(timeout=SLOW)
    page.wait_for_function("document.querySelectorAll('.widget-html pre')[0].textContent.length > 20")
    page.screenshot(path=shots / "two-places.png")
    page.get_by_role("button", name="Kill the drafter").click()
    state.filter(has_text="is gone").wait_for(timeout=60_000)
    before = page.evaluate("document.querySelectorAll('.widget-html pre')[0].textContent.length")
    page.wait_for_function(
        "n => document.querySelectorAll('.widget-html pre')[0].textContent.length > n", arg=before
    )
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached", timeout=60_000)
    page.wait_for_timeout(2000)
    page.screenshot(path=shots / "two-places-dark.png")
    assert page.errors == []
