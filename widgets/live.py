"""The live region as one widget: streaming text, meters, tabs. State is seven traits, actions are messages.

Its script is put together from the files in ``static/``, in order; nothing is fetched, and no module imports
another one, so it also works where the notebook server serves no files.
"""

from __future__ import annotations

from pathlib import Path

import traitlets

from workbench.widgets.acting import Acting

_STATIC = Path(__file__).resolve().parent / "static"
_SCRIPTS = (
    "dom.js",
    "hearing.js",
    "stepper.js",
    "tree.js",
    "drafts.js",
    "run.js",
    "meters.js",
    "tabs.js",
    "live.js",
)
_STYLES = ("live.css", "controls.css", "lanes.css", "tree.css")


def joined(names: tuple[str, ...]) -> str:
    """Files of ``static/`` as one text, in order."""
    return "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in names)


class Live(Acting):
    """What the front end draws; ``action`` receives its messages, mappings with a name under ``do``."""

    _esm = joined(_SCRIPTS)
    _css = joined(_STYLES)
    status = traitlets.Dict().tag(sync=True)
    text = traitlets.Dict().tag(sync=True)
    meters = traitlets.Dict().tag(sync=True)
    tables = traitlets.Dict().tag(sync=True)
    pages = traitlets.Dict().tag(sync=True)
    drafts = traitlets.Dict().tag(sync=True)
    inputs = traitlets.Dict().tag(sync=True)
