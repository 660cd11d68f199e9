"""The panel in a real JupyterLab, driven as a person does: by pointer and by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 180_000  # ms: a kernel that imports torch on a busy machine
CELL = """
from workbench.widgets import Panel
panel = Panel("tiny", sampling={"max_tokens": 64, "ignore_eos": True})
panel
"""

IMPATIENT = """
const patience = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => patience(ms === 2000 ? 1 : ms);
"""
"""A browser in which no script loads within the two seconds that anywidget gives it."""

FOCUSED = """(e => e.getAttribute("aria-label") || e.textContent.trim() || e.id.split("-").pop())
(document.activeElement)"""


@pytest.fixture
def panel_page(open_notebook: Callable[..., Any]) -> Any:
    """The panel, whole."""
    page = open_notebook(CELL)
    page.wait_for_selector(".iwb-live", timeout=SLOW)
    page.get_by_label("number format").wait_for(timeout=SLOW)
    return page


def wait_state(page: Any, state: str) -> None:
    page.wait_for_selector(f'.iwb-live[data-state="{state}"]', timeout=SLOW)


def run_to_the_end(page: Any) -> None:
    """Press Run; the recipe on screen produces all its tokens."""
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".iwb-stale").wait_for(state="hidden", timeout=SLOW)
    page.locator(".iwb-count").filter(has_text="64 / 64 tokens").wait_for(timeout=SLOW)
    wait_state(page, "idle")


def choose_theme(page: Any, name: str) -> None:
    """Dark or Light; JupyterLab keeps it for the pages of later tests."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text(f"JupyterLab {name}", exact=True).click()
    light = "true" if name == "Light" else "false"
    page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached", timeout=30_000)


def test_a_run_streams_and_a_switch_is_acknowledged(panel_page: Any, shots: Path) -> None:
    page = panel_page
    assert page.get_by_text("Nothing has been run yet").is_visible()
    run_to_the_end(page)
    assert page.locator(".iwb-text").text_content()
    page.get_by_role("button", name="Pin as A").click()

    page.get_by_role("checkbox", name="Paged KV", exact=True).check()
    start = monotonic()
    page.locator(".iwb-stale").filter(has_text="recipe changed").wait_for(timeout=5000)
    acknowledged = monotonic() - start
    for name in ("KIVI", "N-gram lookup"):
        page.get_by_role("checkbox", name=name, exact=True).check()
    page.get_by_text("switch off KIVI first").first.wait_for(timeout=SLOW)
    page.screenshot(path=shots / "stale.png")
    run_to_the_end(page)
    page.locator(".iwb-delta").filter(has_text="than A").wait_for(timeout=SLOW)
    assert page.locator(".iwb-text .iwb-accepted, .iwb-text .iwb-corrected").count() > 0
    page.get_by_role("tab", name="Compare").click()
    assert page.locator(".iwb-compare").get_by_role("rowheader", name="KV in use").is_visible()
    page.screenshot(path=shots / "light.png")
    print(f"acknowledged in {acknowledged * 1e3:.0f} ms")
    assert page.errors == []


def test_dark_and_narrow(panel_page: Any, shots: Path) -> None:
    page = panel_page
    choose_theme(page, "Dark")
    page.get_by_role("checkbox", name="Paged KV", exact=True).check()
    page.get_by_role("checkbox", name="N-gram lookup", exact=True).check()
    run_to_the_end(page)
    page.screenshot(path=shots / "dark.png")
    page.set_viewport_size({"width": 820, "height": 1500})
    page.wait_for_timeout(500)
    page.screenshot(path=shots / "narrow.png")
    controls, live = page.locator(".iwb-controls").bounding_box(), page.locator(".iwb-live").bounding_box()
    assert live["y"] >= controls["y"] + controls["height"]  # stacked
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector('.iwb-root'))")
    assert page.errors == []


def test_stop_and_keyboard(open_notebook: Callable[..., Any]) -> None:
    page = open_notebook(CELL.replace('"max_tokens": 64', '"max_tokens": 1500'))
    page.wait_for_selector(".iwb-live", timeout=SLOW)
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.fill("def area(width, height):")
    prompt.press("Control+Enter")
    page.wait_for_function("document.querySelectorAll('.iwb-text .iwb-tok').length > 3", timeout=SLOW)
    prompt.press("Escape")
    wait_state(page, "idle")
    page.get_by_text("stopped").wait_for(timeout=SLOW)

    # In reading order: prompt, five sampling fields, Run, then the text (Stop has nothing to stop).
    prompt.focus()
    reached = []
    for _ in range(7):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    assert reached == ["temperature", "top_p", "max_tokens", "n", "seed", "▶ Run", "generated text"]

    page.get_by_role("tab", name="History").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Code").get_attribute("aria-selected") == "true"
    assert page.get_by_text("workbench run").is_visible()
    assert page.errors == []


def test_menus_measure_and_pages(panel_page: Any, shots: Path) -> None:
    page = panel_page
    page.get_by_label("prompt to start from").select_option(index=2)
    page.get_by_label("number format").select_option("float32")
    page.locator(".iwb-count").filter(has_text="opening").or_(page.locator(".iwb-stale")).first.wait_for(
        state="attached", timeout=SLOW
    )
    wait_state(page, "idle")
    page.get_by_label("samples").fill("2")
    page.get_by_label("samples").press("Enter")
    page.get_by_role("checkbox", name="Paged KV", exact=True).check()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".iwb-count").filter(has_text="128 / 128 tokens").wait_for(timeout=SLOW)
    wait_state(page, "idle")
    assert page.locator(".iwb-pagemap .iwb-page").count() > 0
    assert page.locator(".iwb-pages").get_by_role("rowheader").count() >= 1
    page.get_by_role("button", name="Measure", exact=True).click()
    page.locator(".iwb-meters").get_by_text("held-out text").wait_for(timeout=SLOW)
    page.set_viewport_size({"width": 800, "height": 2600})  # the panel itself is about 700 px wide
    page.wait_for_timeout(500)
    page.screenshot(path=shots / "narrow-menus.png")
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector('.iwb-root'))")
    assert page.get_by_label("number format").input_value() == "float32"
    assert page.errors == []


def test_narrow_in_light_with_runs_that_are_not_compared(panel_page: Any, shots: Path) -> None:
    page = panel_page
    choose_theme(page, "Light")
    run_to_the_end(page)
    page.get_by_role("button", name="Pin as A").click()
    page.get_by_label("temperature").fill("0.8")
    page.get_by_label("temperature").press("Enter")
    run_to_the_end(page)
    said = page.locator(".iwb-delta").filter(has_text="not compared with A (plain)")
    said.wait_for(timeout=SLOW)
    assert "temperature 0.8 instead of 0" in said.text_content()
    assert "faster" not in said.text_content()
    page.set_viewport_size({"width": 820, "height": 1900})
    page.wait_for_timeout(500)
    page.screenshot(path=shots / "narrow-light.png")
    controls, live = page.locator(".iwb-controls").bounding_box(), page.locator(".iwb-live").bounding_box()
    assert live["y"] >= controls["y"] + controls["height"]  # stacked
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth + 1)(document.querySelector('.iwb-root'))")
    assert page.errors == []


def test_a_script_that_loads_too_late_for_its_host_is_heard_all_the_same(
    open_notebook: Callable[..., Any],
) -> None:
    page = open_notebook(CELL, script=IMPATIENT)
    page.wait_for_selector(".iwb-live", timeout=SLOW)
    run_to_the_end(page)
    page.get_by_role("button", name="Options of Paged KV").click()
    page.get_by_text("page size", exact=False).first.wait_for(timeout=SLOW)
    assert page.errors == []
