"""Layouts and styles that widgets share when they look alike.

Every ipywidget makes a layout and a style of its own, a kilobyte and a half in a saved notebook; a panel has
hundreds of labels. What is changed later, a row that hides for instance, needs its own.
"""

from __future__ import annotations

from typing import Any

import ipywidgets as w

_made: dict[tuple[Any, ...], Any] = {}


def layout(**fields: str) -> Any:
    """The layout with these fields; none: as the front end would have it."""
    return _one(w.Layout, fields)


def style(kind: type) -> Any:
    """The default style of a kind of widget, e.g. ``style(w.Label)``."""
    return _one(kind.class_traits()["style"].klass, {})


def _one(kind: type, fields: dict[str, str]) -> Any:
    key = (kind, *sorted(fields.items()))
    found = _made.get(key)
    if found is None or found.comm is None:  # somebody closed all widgets
        found = _made[key] = kind(**fields)
    return found
