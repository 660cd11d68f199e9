"""A cell that needs an optional package says how to get it, instead of ending the notebook."""

from __future__ import annotations

import html
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench.spec.errors import MissingExtra


class Notice:
    """A sentence in place of what could not be shown."""

    def __init__(self, error: MissingExtra) -> None:
        self.message, self.hint = error.message, error.hint

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        shown = f"<p><b>{html.escape(self.message)}</b> {html.escape(self.hint)}</p>"
        return {"text/plain": f"{self.message} {self.hint}", "text/html": shown}


@contextmanager
def optional() -> Iterator[None]:
    """Around a cell's body: a missing package becomes a :class:`Notice`, other errors stay errors."""
    try:
        yield
    except MissingExtra as error:
        from IPython.display import display

        display(Notice(error))
