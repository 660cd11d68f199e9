"""The head of the recipe column: model, device and number format, and what is being opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from workbench.widgets.live import joined


class Head(anywidget.AnyWidget):
    """Three menus; a choice is sent to ``action`` as ``{"do": "open", menu: value}``."""

    _esm = joined(("dom.js", "head.js"))
    where = traitlets.Dict().tag(sync=True)

    def __init__(self, action: Callable[[Mapping[str, Any]], None], **traits: Any) -> None:
        self._action = action
        super().__init__(**traits)

    def _handle_custom_msg(self, content: Any, buffers: Any) -> None:
        if isinstance(content, Mapping) and isinstance(content.get("do"), str):
            self._action(content)
