"""Draft trees on screen: drawn by the front end as SVG, stepped through with a native slider.

All rounds are sent once; moving the slider asks the kernel for nothing, so it also works while a cell runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.spec.errors import MissingExtra
from workbench.widgets import clean

try:
    import anywidget
    import traitlets
except ImportError:
    raise MissingExtra("anywidget", "lab", "A live view") from None
from workbench.widgets.live import joined

if TYPE_CHECKING:
    from workbench.widgets.spec_views.draft_tree import DraftRounds


class TreeView(anywidget.AnyWidget):
    """``at`` is the round on screen; setting it from Python moves the slider."""

    _esm = joined(("dom.js", "stepper.js", "tree.js", "tree_view.js"))
    _css = joined(("live.css", "lanes.css", "tree.css"))
    picture = traitlets.Dict().tag(sync=True)
    at = traitlets.Int(0).tag(sync=True)

    def __init__(self, rounds: DraftRounds) -> None:
        super().__init__(picture=clean.plain(rounds.to_dict()), at=rounds.first)
        self._still = rounds

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Where no widget can be shown, the words of the round stand in its place."""
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        words = f"{self._still.title}: {self._still.rounds[self._still.first].words}"
        return {**data, "text/plain": words}
