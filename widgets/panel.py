"""The panel: one session, one recipe, everything a person does as a method.

A click and a call take the same way: both post to the session and return. ``panel.run().wait()`` in a cell is
what the Run button does, so that a notebook executed without a browser runs the same code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from workbench.core import catalog
from workbench.core.session import Session
from workbench.models.registry import resolve
from workbench.spec.errors import Cancelled, OptionError, RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.spec.technique import Scalar
from workbench.widgets import page, views
from workbench.widgets.ab import AB, measure
from workbench.widgets.clicks import Clicks
from workbench.widgets.code import Form, as_code
from workbench.widgets.controller import Controller
from workbench.widgets.handle import PanelRun
from workbench.widgets.opening import Opening
from workbench.widgets.palette import Theme
from workbench.widgets.problem import Problem
from workbench.widgets.prompts import examples
from workbench.widgets.publisher import Publisher
from workbench.widgets.state import DEFAULT_PROMPT, PanelState
from workbench.widgets.table import Table


class Panel:
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
        self._controller = Controller(opened, state, self._publisher.mark, owns=bool(name))
        if recipe is not None and not name:
            self.apply(recipe)

    # -- state ------------------------------------------------------------------------------------------

    @property
    def session(self) -> Any:
        """The session that runs everything; :meth:`open` replaces it."""
        return self._controller.session

    @property
    def recipe(self) -> Recipe:
        """The recipe on screen."""
        return self._controller.recipe

    @property
    def state(self) -> dict[str, Any]:
        """Everything the panel shows but its results, as JSON; :meth:`from_state` reads it."""
        return self._controller.state.to_json()

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

    @property
    def prompt(self) -> str:
        """The prompt on screen."""
        return self._controller.state.prompt

    @prompt.setter
    def prompt(self, text: str) -> None:
        self._edit(prompt=str(text))

    @property
    def chat(self) -> bool:
        """The prompt is a message for the model's chat template; otherwise it is continued as it stands."""
        return self._controller.state.chat

    @chat.setter
    def chat(self, on: bool) -> None:
        self._edit(chat=bool(on))

    @property
    def sampling(self) -> dict[str, Any]:
        """:class:`SamplingParams` fields that differ from their defaults; assigning replaces them all."""
        return dict(self._controller.state.sampling)

    @sampling.setter
    def sampling(self, values: Mapping[str, Any]) -> None:
        self._edit(sampling=dict(values))

    @property
    def last(self) -> Run | None:
        """The latest run that ended with something to show."""
        return self._controller.last

    @property
    def runs(self) -> tuple[Run, ...]:
        """The latest runs, oldest first."""
        return tuple(self._controller.runs)

    @property
    def history(self) -> tuple[Run, ...]:
        """The latest runs and quality measurements, oldest first."""
        return tuple(self._controller.history)

    @property
    def pinned(self) -> Run | None:
        """The run pinned as A."""
        return self._controller.pinned

    @property
    def problem(self) -> Problem | None:
        """What went wrong last, as the panel shows it."""
        return self._controller.problem

    @property
    def busy(self) -> bool:
        """Something was asked for that has not happened yet."""
        return self._controller.busy

    @property
    def lock(self) -> Any:
        """Guards the panel's state; hold it to read and change it in one go."""
        return self._controller.lock

    @property
    def stale(self) -> bool:
        """What is shown was produced by another recipe."""
        return self._controller.stale

    # -- actions ----------------------------------------------------------------------------------------

    def open(self, model: str = "", *, device: str = "", dtype: str = "") -> Opening:
        """Go on with another model, device or number format; recipe, prompt and sampling stay.

        Returns at once with the :class:`Opening`; the session before is replaced, and closed if the panel
        opened it, once the new one has its weights. A run in flight starts again on it. Raises
        :class:`ModelNotFound` for a model that is not on this machine; other errors end the opening and stay
        on screen.
        """
        plan = self.session.plan
        wanted = {"model": model or plan.model, "device": device or plan.device, "dtype": dtype or plan.dtype}
        resolve(wanted["model"])
        options = {"numerics": plan.numerics, **self._options}
        options |= {"device": wanted["device"], "dtype": wanted["dtype"]}
        return self._controller.open(lambda: Session(wanted["model"], self.recipe, **options), wanted)

    def use_prompt(self, name: str) -> None:
        """Take a shipped prompt, by its name in ``prompts.examples()``. Raises :class:`OptionError`."""
        example = examples().get(name)
        if example is None:
            raise OptionError(f"There is no prompt {name!r}.", hint=f"Prompts: {', '.join(examples())}.")
        self._edit(
            prompt=example.text, chat=example.chat and self.session.tokenizer.chat_template is not None
        )

    def measure(self, **settings: Any) -> Any:
        """Measure the recipe's quality against plain on held-out text; returns the session's task.

        Its result is a :class:`Run` with KL, top-1 agreement and perplexity, kept in :attr:`history`.
        ``settings``: fields of :class:`QualitySettings`. Raises what ``submit_quality`` raises.
        """
        return self._controller.measure(**settings)

    def stop_measuring(self) -> None:
        """Stop the measurement in flight within one forward pass; nothing of it is kept."""
        with self.lock:
            self._controller.measuring.cancel()
        self._publisher.mark()

    def restore(self, run: Run) -> Any:
        """Show again what a run of this panel was made from: its recipe, prompt as it was typed, sampling."""
        state = self._controller.states.get(run.id)
        if state is None:
            raise RecordError("This panel does not know that run.", hint="Take one of panel.runs.")
        self._edit(prompt=state.prompt, chat=state.chat, sampling=dict(state.sampling))
        return self.apply(state.recipe)

    def look(self) -> None:
        """Look again which models are on this machine."""
        if self._gui is not None:
            self._gui.forget_menus()
        self._publisher.mark()

    def set(self, technique: str, on: bool = True, /, **options: Scalar) -> Any:
        """Switch a technique on with options, change its options, or switch it off. Returns the session's
        live job.

        Raises :class:`PlanError` when it does not fit, :class:`UnknownTechnique`, :class:`OptionError`;
        nothing is changed then. A run in flight starts again from the prompt on screen.
        """
        return self._controller.switch(technique, on, options)

    def apply(self, recipe: Recipe) -> Any:
        """Put a whole recipe in place; as :meth:`set` otherwise."""
        return self._controller.apply(recipe)

    def undo(self) -> Any:
        """Back to the recipe before; None when there is none."""
        return self._controller.undo()

    def redo(self) -> Any:
        """Ahead again; None when there is nothing to redo."""
        return self._controller.undo(forward=True)

    def run(self, prompt: str | None = None, **sampling: Any) -> PanelRun:
        """Run the prompt on screen; ``prompt`` and ``sampling`` replace what is there first."""
        if prompt is not None:
            self.prompt = prompt
        if sampling:
            self.sampling = {**self.sampling, **sampling}
        return self._controller.run()

    def stop(self) -> None:
        """Stop the run in flight within one engine step and keep its partial result; without one, stop
        what is being opened or measured."""
        self._controller.stop()

    def pin(self, run: Run | None = None) -> Run:
        """Keep a run, by default the latest, as A: every later run is compared with it."""
        c = self._controller
        with c.lock:
            pinned = run or c.last
            if pinned is None:
                raise RecordError("There is no run to pin.", hint="Run a prompt first.")
            c.pinned = pinned
        self._publisher.mark()
        return pinned

    def ab(self, a: Recipe, b: Recipe, *, repeats: int = 3, budget_s: float = inf) -> AB:
        """Measure two recipes on the prompt on screen, in turn; the recipe on screen comes back.

        ``repeats`` pairs after one that warms up, or as many as ``budget_s`` seconds allow.
        """
        before = self.recipe

        def once(recipe: Recipe) -> Run:
            if recipe != self.recipe:
                self.apply(recipe)
            run = self.run().result()
            if run.state != "done":
                raise Cancelled("The comparison was stopped.")
            return run

        try:
            return measure(once, a, b, repeats, budget_s)
        finally:
            if before != self.recipe:
                self.apply(before)

    def save(self, run: Run | None = None) -> Run:
        """Put a run, by default the latest, into the record store."""
        saved = run or self.last
        if saved is None:
            raise RecordError("There is no run to save.", hint="Run a prompt first.")
        if self.store is None:
            self.store = page.default_store()
        self.store.save(saved, label=" + ".join(str(u["id"]) for u in saved.recipe) or "plain")
        return saved

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

    def _edit(self, **values: Any) -> None:
        c = self._controller
        with c.lock:
            c.state = replace(c.state, **values)
        self._publisher.mark()


def _strict() -> bool:
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return ci or "PYTEST_CURRENT_TEST" in os.environ
