"""Panels, controls and views of the workbench, imported as `workbench.widgets`.

Importing this package costs nothing and needs nothing beyond the core: ipywidgets, anywidget and plotly
belong to the `lab` extra and are imported by the modules that draw, at the moment they are used. Widgets sit
on top of everything; no other package imports them, and they never import a technique's module.
"""

from __future__ import annotations

from workbench.widgets.lazy import names_in

_WHERE = {
    "Panel": "panel",
    "PanelState": "state",
    "Table": "table",
    "parameters": "notebook",
    "to_figure": "views",
    "to_table": "views",
}

__all__ = ["Panel", "PanelState", "Table", "parameters", "to_figure", "to_table"]

__getattr__ = names_in(__name__, _WHERE)
