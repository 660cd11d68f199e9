"""Run the first notebook headless, print its results and keep it as a page: `make demo`.

Papermill runs it inside notebooks/, as a person would; what the cells tagged `result` display is printed, and
the executed notebook is written to reports/ as .ipynb and .html. The page holds all it needs, plotly's script
once, and asks no other place for anything: equations stand as they were typed, and the live panel, which
needs a kernel, is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import papermill
import plotly.io
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00_start.ipynb"
REPORTS = ROOT / "reports"
FIGURE = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
# nbconvert's own page, without the scripts that it takes from the web; and a browser that would not let it.
TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline';
  style-src 'unsafe-inline'; img-src data: blob:; font-src data:">
{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""


def main(model: str) -> int:
    """Execute the notebook on a model; 1 when no cell of it shows a result."""
    REPORTS.mkdir(exist_ok=True)
    executed = REPORTS / NOTEBOOK.name
    papermill.execute_notebook(
        str(NOTEBOOK), str(executed), parameters={"model": model}, cwd=str(NOTEBOOK.parent), log_output=False
    )
    notebook = nbformat.read(executed, as_version=4)
    report = executed.with_suffix(".html")
    report.write_text(page_of(notebook), encoding="utf-8")

    results = [text for cell in notebook.cells for text in shown_by(cell)]
    print("\n\n".join(results))
    print(f"\nreport: {report.relative_to(ROOT)}")
    if not results:
        print(f"{NOTEBOOK.name} has no cell tagged `result` that displays text", file=sys.stderr)
        return 1
    return 0


def page_of(notebook: nbformat.NotebookNode) -> str:
    """The notebook as one page that needs no network; figures and controls in it are replaced."""
    draw_figures(notebook)
    leave_out_widgets(notebook)
    page, _ = HTMLExporter(embed_images=True, raw_template=TEMPLATE).from_notebook_node(notebook)
    return str(page)


def draw_figures(notebook: nbformat.NotebookNode) -> None:
    """Give every plotly figure of the outputs an HTML form; the first one brings plotly's script along."""
    script = True
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            figure = output.get("data", {}).get(FIGURE)
            if figure is not None:
                shown = {"data": figure.get("data", []), "layout": figure.get("layout", {})}
                output.data["text/html"] = plotly.io.to_html(
                    shown, full_html=False, include_plotlyjs=script, validate=False
                )
                script = False


def leave_out_widgets(notebook: nbformat.NotebookNode) -> None:
    """Drop live controls: on a page they fetch their script from the web, and then work on nothing."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]


def shown_by(cell: nbformat.NotebookNode) -> list[str]:
    """Plain text that a cell tagged `result` printed or displayed, in order; figures are for the page."""
    if cell.cell_type != "code" or "result" not in cell.metadata.get("tags", []):
        return []
    shown = [out for out in cell.outputs if FIGURE not in out.get("data", {})]
    texts = (out.get("text") or out.get("data", {}).get("text/plain", "") for out in shown)
    return [text.rstrip() for text in texts if text.strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
