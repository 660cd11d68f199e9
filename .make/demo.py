"""Run the first notebook headless, print its results and keep it as a page: `make demo`.

Papermill runs it inside notebooks/, as a person would; what the cells tagged `result` display is printed, and
the executed notebook is written to reports/ as .ipynb and .html.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import papermill
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "00_start.ipynb"
REPORTS = ROOT / "reports"


def main(model: str) -> int:
    """Execute the notebook on a model; 1 when no cell of it shows a result."""
    REPORTS.mkdir(exist_ok=True)
    executed = REPORTS / NOTEBOOK.name
    papermill.execute_notebook(
        str(NOTEBOOK), str(executed), parameters={"MODEL": model}, cwd=str(NOTEBOOK.parent), log_output=False
    )
    notebook = nbformat.read(executed, as_version=4)
    page, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
    report = executed.with_suffix(".html")
    report.write_text(page, encoding="utf-8")

    results = [text for cell in notebook.cells for text in shown_by(cell)]
    print("\n\n".join(results))
    print(f"\nreport: {report.relative_to(ROOT)}")
    if not results:
        print(f"{NOTEBOOK.name} has no cell tagged `result` that displays text", file=sys.stderr)
        return 1
    return 0


def shown_by(cell: nbformat.NotebookNode) -> list[str]:
    """Plain text that a cell tagged `result` printed or displayed, in order."""
    if cell.cell_type != "code" or "result" not in cell.metadata.get("tags", []):
        return []
    texts = (out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)
    return [text.rstrip() for text in texts if text.strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
