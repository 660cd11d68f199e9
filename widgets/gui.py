"""The panel on screen: controls on the left, the live region beside it. Created in the main thread, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as w

from workbench.widgets import clean, snapshot, where
from workbench.widgets.clicks import Clicks
from workbench.widgets.controller import Controller
from workbench.widgets.controls import Controls
from workbench.widgets.head import Head
from workbench.widgets.live import Live
from workbench.widgets.presets import presets
from workbench.widgets.views import pages


class Gui:
    """Widgets of one panel. :meth:`show` is called by the publisher only."""

    def __init__(
        self,
        controller: Controller,
        techniques: Sequence[Any],
        clicks: Clicks,
    ) -> None:
        self._controller = controller
        self.head = Head(clicks.act)
        self.controls = Controls(
            techniques,
            self.head,
            presets=presets(),
            switch=clicks.switch,
            apply=clicks.choose,
            undo=clicks.undo,
        )
        self.live = Live(clicks.act)
        grid = w.Box([self.controls.widget, self.live])
        grid.add_class("iwb-grid")
        self.widget = w.Box([grid])
        self.widget.add_class("iwb-root")
        self._tables: object = None
        self._inputs: object = None
        self._menus: object = None
        self._pages: Any = None
        self._drafts: object = None
        self.show()

    def show(self) -> None:
        """Set every trait that changed."""
        c = self._controller
        remedies = c.standing_against(list(self.controls.rows))
        with c.lock:
            # A person's click waits for this lock: it is either in the recipe already, or not on screen yet.
            self.controls.show(
                c.recipe, remedies, c.recipes.back() is not None, c.recipes.ahead() is not None
            )
            traits: dict[str, Any] = {
                "status": snapshot.status(c),
                "text": {"run": c.live.submitted if c.live is not None else 0, "pieces": snapshot.text(c)},
                "meters": snapshot.meters(c),
            }
            inputs = (c.state.prompt, c.state.chat, tuple(sorted(c.state.sampling.items())), c.session)
            if inputs != self._inputs:
                self._inputs = inputs
                traits["inputs"] = snapshot.inputs(c)
            opening = c.opening.message or "reading the checkpoint" if c.opening is not None else ""
            if c.live is not None and c.live.pages is not self._pages:
                self._pages = c.live.pages
                traits["pages"] = pages.drawn(self._pages, c.live.changes) if self._pages is not None else {}
            drafts = (c.live, len(c.live.steps)) if c.live is not None else None
            if drafts != self._drafts and c.live is not None:
                self._drafts = drafts
                traits["drafts"] = clean.plain(c.live.drafts_tab())
            menus = (c.session, c.session.plan.page_size, tuple(c.wanted.items()), opening)
            if menus != self._menus:
                self._menus = menus
                self.head.where = where.menus(c.session.plan, c.wanted, opening)
            latest = c.history[-1].id if c.history else ""
            shown = (c.state, latest, c.pinned.id if c.pinned else "")
            if shown != self._tables:
                self._tables = shown
                traits["tables"] = snapshot.tables(c)
        with self.live.hold_sync():
            for name, value in traits.items():
                setattr(self.live, name, value)

    def forget_menus(self) -> None:
        """Look again, at the next picture, which models and devices there are."""
        self._menus = None

    def close(self) -> None:
        """Take the widgets, and the models behind them, off the screen."""
        for widget in _tree(self.widget):
            widget.close()


def _tree(widget: Any) -> list[Any]:
    found = [widget]
    for child in getattr(widget, "children", ()):
        found += _tree(child)
    return found
