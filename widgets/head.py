"""The head of the recipe column: model, device and number format, and what is being opened."""

from __future__ import annotations

import traitlets

from workbench.widgets.acting import Acting
from workbench.widgets.live import joined


class Head(Acting):
    """Three menus; a choice is sent to ``action`` as ``{"do": "open", menu: value}``."""

    _esm = joined(("dom.js", "hearing.js", "head.js"))
    where = traitlets.Dict().tag(sync=True)
