"""What a person does with a panel, as methods: each posts to the session and returns, as a click does."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from workbench.core.session import Session
from workbench.models.registry import resolve
from workbench.spec.errors import Cancelled, OptionError, RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.spec.technique import Scalar
from workbench.widgets import page
from workbench.widgets.ab import AB, measure
from workbench.widgets.handle import PanelRun
from workbench.widgets.opening import Opening
from workbench.widgets.prompts import examples
from workbench.widgets.shown import Shown


class Actions(Shown):
    """The actions of :class:`Panel`, which owns what they work on."""

    store: Any
    _gui: Any
    _options: Mapping[str, Any]

    def open(self, model: str = "", *, device: str = "", dtype: str = "") -> Opening:
        """Go on with another model, device or number format; recipe, prompt and sampling stay.

        Returns at once with the :class:`Opening`; the session before is replaced once the new one has its
        weights. If the panel opened it, it frees its memory before that, and is closed afterwards. A run in
        flight starts again on the new one. Raises :class:`ModelNotFound` for a model that is not on this
        machine; other errors end the opening and stay on screen.
        """
        plan = self.session.plan
        wanted = {"model": model or plan.model, "device": device or plan.device, "dtype": dtype or plan.dtype}
        resolve(wanted["model"])
        options = {"numerics": plan.numerics, **self._options}
        options |= {"device": wanted["device"], "dtype": wanted["dtype"]}
        return self._controller.open(
            lambda: Session(wanted["model"], self.recipe, load=False, **options), wanted
        )

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
