"""The panel: one session, one recipe, everything a person does as a method.

A click and a call take the same way: both post to the session and return. ``panel.run().wait()`` in a cell is
what the Run button does, so that a notebook executed without a browser runs the same code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from workbench.core import catalog
from workbench.core.session import Session
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.widgets import page, views
from workbench.widgets.actions import Actions
from workbench.widgets.clicks import Clicks
from workbench.widgets.code import Form, as_code
from workbench.widgets.mover import Mover
from workbench.widgets.palette import Theme
from workbench.widgets.problem import Problem
from workbench.widgets.publisher import Publisher
from workbench.widgets.state import DEFAULT_PROMPT, PanelState
from workbench.widgets.table import Table


class Panel(Actions):
    """A panel on a session, or on a model for which it opens one (and closes it with itself).

    ``session``: a :class:`Session`, or the name of a model. ``recipe``: what is switched on at the start.
    ``store``: where :meth:`save` puts runs. ``sampling``: :class:`SamplingParams` fields. ``chat``: the
    prompt is a chat message; by default if the model has a chat template. ``strict``: what goes wrong in a
    click is also raised, not only shown; by default in tests and in CI. Further keywords go to
    :class:`Session`.
    """

    def __init__(
        self,
        session: Any = None,
        *,
        model: str = "",
        recipe: Recipe | None = None,
        store: Any = None,
        prompt: str = DEFAULT_PROMPT,
        sampling: Mapping[str, Any] | None = None,
        chat: bool | None = None,
        strict: bool | None = None,
        **session_options: Any,
    ) -> None:
        name = session if isinstance(session, str) else model
        if not name and session is None:
            raise OptionError("A panel needs a session or a model.", hint='For example Panel(model="tiny").')
        opened = Session(name, recipe, **session_options) if name else session
        self._options = session_options or {"profile": opened.profile}  # for sessions opened later
        self.store = store
        self.strict = _strict() if strict is None else strict
        self._gui: Any = None
        self._missing = ""
        if chat is None:
            chat = opened.tokenizer.chat_template is not None
        state = PanelState(opened.plan.model, opened.recipe, prompt, dict(sampling or {}), chat)
        self._publisher = Publisher(self._show)
        self._controller = Mover(opened, state, self._publisher.mark, owns=bool(name))
        if recipe is not None and not name:
            self.apply(recipe)

    @classmethod
    def from_state(cls, state: object, session: Any = None, **options: Any) -> Panel:
        """The panel of a state (mapping or JSON text), on ``session`` or a new one for the state's model.

        ``options`` override the state: ``device="cpu"`` opens here what was saved beside a GPU.
        """
        s = PanelState.from_json(state)
        name = s.model if session is None else ""
        if session is None:
            options = {"dtype": s.dtype, "device": s.device, "numerics": s.numerics, **options}
        return cls(
            session,
            model=name,
            recipe=s.recipe,
            prompt=s.prompt,
            sampling=s.sampling,
            chat=s.chat,
            **options,
        )

    # -- life -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop, free the widgets, and close the session if the panel opened it."""
        self._controller.close()
        self._publisher.close()
        if self._gui is not None:
            self._gui.close()
        if self._controller.owns:
            self.session.close()

    def __enter__(self) -> Panel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- results ----------------------------------------------------------------------------------------

    def to_figure(self, view: str = "memory", *, theme: Theme = "auto") -> Any:
        """A view of the pinned and the latest run as a plotly figure; its names: ``views.VIEWS``."""
        return views.to_figure(view, *self._shown(view), theme=theme)

    def to_table(self, view: str = "latency") -> Table:
        """The same view as a table."""
        return views.to_table(view, *self._shown(view))

    def as_code(self, form: Form = "python") -> str:
        """The panel's state as a cell, a command line, or JSON."""
        return as_code(self._controller.state, form)

    def _shown(self, view: str) -> tuple[Any, ...]:
        live = self._controller.live
        if view == "pages":
            return (live.pages,) if live is not None and live.pages is not None else ()
        pinned, last = self.pinned, self.last
        runs = [r for r in (pinned, last) if r is not None]
        return tuple(runs[:1] if pinned is last else runs)

    # -- on screen --------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """The ipywidget; None where ipywidgets or anywidget is not installed."""
        if self._gui is None and not self._missing:
            try:
                from workbench.widgets.gui import Gui
            except ImportError as err:
                self._missing = err.name or "ipywidgets"
                return None
            self._gui = Gui(
                self._controller,
                catalog.all_techniques(),
                Clicks(self),
            )
        return self._gui.widget if self._gui is not None else None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        widget = self.widget
        still = page.bundle(self.recipe, self.last, self._missing)
        if widget is None:
            return still
        return {
            **widget._repr_mimebundle_(),
            "text/plain": still["text/plain"],
            "text/html": still["text/html"],
        }

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until the screen shows all that happened; False when ``timeout`` seconds passed first."""
        self._publisher.mark()  # an event that ends a run is noticed a moment before it is marked
        return self._publisher.flush(timeout)

    def show_problem(self, problem: Problem | None) -> None:
        """Put a problem on screen, or take the one there away."""
        self._controller.problem = problem
        self._publisher.mark()

    def _show(self) -> None:
        if self._gui is not None:
            self._gui.show()


def _strict() -> bool:
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return ci or "PYTEST_CURRENT_TEST" in os.environ
