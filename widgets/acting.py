"""A drawing of our own whose front end sends what a person does: ``{"do": name, …}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import anywidget
import traitlets


class Acting(anywidget.AnyWidget):
    """``action`` receives the front end's messages, mappings with a name under ``do``; others are dropped.

    ``ident`` is the model's own id: with it a script finds its model again (``static/hearing.js``).
    """

    ident = traitlets.Unicode().tag(sync=True)

    def __init__(self, action: Callable[[Mapping[str, Any]], None], **traits: Any) -> None:
        self._action = action
        ident = uuid4().hex
        super().__init__(model_id=ident, ident=ident, **traits)

    def _handle_custom_msg(self, content: Any, buffers: Any) -> None:
        """A message of the front end. Not through ``on_msg``: its dispatcher hides what a handler raises."""
        if isinstance(content, Mapping) and isinstance(content.get("do"), str):
            self._action(content)
