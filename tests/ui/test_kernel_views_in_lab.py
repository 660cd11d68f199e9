"""Views of kernels in a real JupyterLab: the slider walks, a line of source opens onto its instructions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.timeout(600)]
SLOW = 180_000  # ms: a kernel that imports torch, or a compiler, on a busy machine
WALK = """
from workbench.widgets.kernel_views import attention_row, walk_row
walk_row(attention_row("tiny", keys=64), 16).figure()
"""
CODE = """
from workbench.widgets.kernel_views import read_machine_code
read_machine_code("fa3_fwd", "hd64 causal")[0].page()
"""


def test_the_slider_shows_another_step(open_notebook: Callable[..., Any], shots: Path) -> None:
    page = open_notebook(WALK)
    told = page.locator(".slider-container .slider-label")
    told.first.wait_for(timeout=SLOW)
    assert (told.first.text_content() or "").startswith("tile 4 of 4, keys 0 to 15")
    rail = page.locator(".slider-container .slider-rail-touch-rect").bounding_box()
    page.mouse.click(rail["x"] + 2, rail["y"] + rail["height"] / 2)
    told.first.filter(has_text="tile 1 of 4, keys 48 to 63: the first tile").wait_for(timeout=30_000)
    page.locator(".legendtext", has_text="not read yet").wait_for(timeout=30_000)
    page.screenshot(path=shots / "tile-walk.png")
    assert page.errors == []


def test_a_source_line_opens_by_keyboard(open_notebook: Callable[..., Any], shots: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    page = open_notebook(CODE)
    box = page.locator(".wb-code")
    box.wait_for(timeout=SLOW)
    line = box.locator("details:not(.file)", has_text="MUFU.EX2 under a product").first
    assert not line.locator(".asm").is_visible()
    line.locator("summary").focus()
    page.keyboard.press("Enter")
    line.locator(".asm").wait_for(timeout=30_000)
    assert "MUFU.EX2" in (line.locator(".asm").text_content() or "")
    page.screenshot(path=shots / "machine-code.png")
