"""Lanes on screen: the front end draws them as SVG, and its slider, a native one, obeys pointer and keyboard.

Everything is sent once; moving the slider asks the kernel for nothing, so it also works while a cell runs.
"""

from __future__ import annotations

from typing import Any

from workbench.spec.errors import MissingExtra
from workbench.widgets import clean
from workbench.widgets.lanes import Lanes

try:
    import anywidget
    import traitlets
except ImportError:
    raise MissingExtra("anywidget", "lab", "A live view") from None
from workbench.widgets.live import joined


class LanesView(anywidget.AnyWidget):
    """``at`` is the frame on screen; setting it from Python moves the slider."""

    _esm = joined(("dom.js", "stepper.js", "lanes.js"))
    _css = joined(("live.css", "lanes.css"))
    picture = traitlets.Dict().tag(sync=True)
    at = traitlets.Int(0).tag(sync=True)

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(picture=clean.plain(lanes.to_dict()), at=lanes.first)
        self._still = lanes

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Where no widget can be shown, the words of the frame stand in its place."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        words = f"{self._still.title}: {self._still.frames[self._still.first].words}"
        return {**data, "text/plain": words}
