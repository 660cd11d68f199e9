"""What `make demo` prints and keeps of an executed notebook; the script is not part of a package."""

from __future__ import annotations

import importlib.util
import re
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workbench_demo", ROOT / ".make" / "demo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def displayed(**data: object) -> nbformat.NotebookNode:
    return new_output("display_data", data={k.replace("__", "/"): v for k, v in data.items()})


def test_tables_and_texts_of_result_cells_are_printed_but_no_figure(demo: ModuleType) -> None:
    figure = new_output(
        "display_data", data={demo.FIGURE: {"data": [], "layout": {}}, "text/plain": "Figure"}
    )
    outputs = [figure, displayed(text__plain="a table"), new_output("stream", text="a line\n")]
    cell = new_code_cell(outputs=outputs, metadata={"tags": ["result"]})
    assert demo.shown_by(cell) == ["a table", "a line"]
    assert demo.shown_by(new_code_cell(outputs=outputs)) == []


def test_the_page_holds_its_figures_and_no_live_control(demo: ModuleType) -> None:
    widget = new_output("display_data", data={demo.WIDGET: {"model_id": "x"}, "text/plain": "Panel"})
    figure = new_output("display_data", data={demo.FIGURE: {"data": [], "layout": {}}})
    book = new_notebook(
        cells=[new_code_cell(outputs=[widget, figure]), new_code_cell(outputs=[deepcopy(figure)])]
    )
    book.metadata["widgets"] = {"state": {}}
    demo.draw_figures(book)
    demo.leave_out_widgets(book)
    assert "widgets" not in book.metadata
    (kept,), (second,) = (cell.outputs for cell in book.cells)
    assert "plotly.js" in kept.data["text/html"] and "plotly.js" not in second.data["text/html"]


def test_the_page_asks_no_other_place_for_anything(demo: ModuleType) -> None:
    widget = new_output("display_data", data={demo.WIDGET: {"model_id": "x"}, "text/plain": "Panel"})
    figure = new_output("display_data", data={demo.FIGURE: {"data": [{"y": [1, 2]}], "layout": {}}})
    text = (
        "An equation $x^2$, a [paper](https://arxiv.org/abs/2309.06180)\n\n```mermaid\ngraph LR; A-->B\n```"
    )
    book = new_notebook(cells=[new_markdown_cell(text), new_code_cell(outputs=[widget, figure])])
    book.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    page = demo.page_of(book)
    tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed|video|audio)\b[^>]*>", page)
    assert tags and not [t for t in tags if re.search(r"(src|href|data)\s*=\s*[\"']?(https?:)?//", t)]
    assert "default-src 'none'" in page
    own = "".join(
        re.findall(r"<script[^>]*>.*?</script>", demo.page_of(new_notebook(cells=book.cells[:1])), re.S)
    )
    assert "http" not in own  # the scripts that are not plotly's, which knows maps
    assert "$x^2$" in page and 'href="https://arxiv.org/abs/2309.06180"' in page and "js-plotly-plot" in page
