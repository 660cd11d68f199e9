"""The panel on screen: controls on the left, the live region beside it. Created in the main thread, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as w

from workbench.widgets import alike, clean, snapshot, where
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
        self._tables: object = None  # of each part, what it was last made from
        self._inputs: object = None
        self._menus: object = None
        self._pages: Any = None
        self._drafts: object = None
        # What is drawn by scripts of our own comes first, and with its picture: a message that arrives before
        # a front end has read the script waits for it two seconds and is dropped.
        with controller.lock:
            traits = self._picture()
            self.head = Head(clicks.act, where=self._where())
        self.live = Live(clicks.act, **traits)
        self.controls = Controls(
            techniques,
            self.head,
            presets=presets(),
            switch=clicks.switch,
            apply=clicks.choose,
            undo=clicks.undo,
        )
        grid = w.Box([self.controls.widget, self.live], layout=alike.layout(), _dom_classes=("iwb-grid",))
        self.widget = w.Box([grid], layout=alike.layout(), _dom_classes=("iwb-root",))
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
            traits, menus = self._picture(), self._where()
        if menus:
            self.head.where = menus
        with self.live.hold_sync():
            for name, value in traits.items():
                setattr(self.live, name, value)

    def _picture(self) -> dict[str, Any]:
        """What changed of the live region, by trait. The controller's lock is held."""
        c = self._controller
        traits: dict[str, Any] = {
            "status": snapshot.status(c),
            "text": {"run": c.live.submitted if c.live is not None else 0, "pieces": snapshot.text(c)},
            "meters": snapshot.meters(c),
        }
        inputs = (c.state.prompt, c.state.chat, tuple(sorted(c.state.sampling.items())), c.session)
        if inputs != self._inputs:
            self._inputs = inputs
            traits["inputs"] = snapshot.inputs(c)
        if c.live is not None and c.live.pages is not self._pages:
            self._pages = c.live.pages
            traits["pages"] = pages.drawn(self._pages, c.live.changes) if self._pages is not None else {}
        drafts = (c.live, len(c.live.steps)) if c.live is not None else None
        if drafts != self._drafts and c.live is not None:
            self._drafts = drafts
            traits["drafts"] = clean.plain(c.live.drafts_tab())
        latest = c.history[-1].id if c.history else ""
        shown = (c.state, latest, c.pinned.id if c.pinned else "")
        if shown != self._tables:
            self._tables = shown
            traits["tables"] = snapshot.tables(c)
        return traits

    def _where(self) -> dict[str, Any]:
        """The menus of the head, if they changed. The controller's lock is held."""
        c = self._controller
        opening = c.opening.message or "reading the checkpoint" if c.opening is not None else ""
        menus = (c.session, c.session.plan.page_size, tuple(c.wanted.items()), opening)
        if menus == self._menus:
            return {}
        self._menus = menus
        return where.menus(c.session.plan, c.wanted, opening)

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
