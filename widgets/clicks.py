"""What controls and the front end call: a panel's methods, and a screen that says what went wrong.

An exception in a widget's handler usually ends in a hidden log. Here it is shown with what was being done and
the way out; in tests and in CI (``panel.strict``) it is raised as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.spec.technique import Scalar
from workbench.widgets.problem import Problem

if TYPE_CHECKING:
    from workbench.widgets.panel import Panel

_DOING = {
    "run": "starting a run",
    "open": "opening another model",
    "example": "choosing a prompt",
    "chat": "changing the prompt",
    "measure": "measuring quality",
    "prompt": "changing the prompt",
    "sampling": "setting {}",
    "stop": "stopping the run",
    "pin": "pinning a run",
    "save": "saving a run",
}
_FRACTIONS = ("temperature", "top_p", "min_p")


class Clicks:
    """Handlers of one panel's controls. Each posts and returns."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel

    def switch(self, technique: str, on: bool, options: dict[str, Scalar]) -> None:
        """A technique's switch, or one of its options."""
        panel = self._panel
        with self._guard(f"switching {technique} {'on' if on else 'off'}"), panel.lock:
            use = panel.recipe.get(technique)
            if options and use is None:
                return  # options of a technique that is off are shown, not kept
            if bool(use) != on or options:
                panel.set(technique, on, **options)

    def choose(self, recipe: Recipe) -> None:
        """A preset."""
        with self._guard("choosing a preset"), self._panel.lock:
            if recipe.key != self._panel.recipe.key:
                self._panel.apply(recipe)

    def undo(self, forward: bool) -> None:
        """The undo and redo buttons."""
        with self._guard("redo" if forward else "undo"):
            (self._panel.redo if forward else self._panel.undo)()

    def act(self, message: Mapping[str, Any]) -> None:
        """One message of the front end."""
        panel, do = self._panel, message["do"]
        with self._guard(_DOING.get(do, do).format(message.get("name", ""))):
            if do == "run":
                panel.run(message.get("prompt"))
            elif do == "prompt":
                panel.prompt = message["text"]
            elif do == "sampling":
                name, value = message["name"], message["value"]
                if not isinstance(value, int | float):
                    raise OptionError(
                        f"{name} needs a number.", hint="Type one, or leave the field as it was."
                    )
                number = float(value) if name in _FRACTIONS else int(value)
                panel.sampling = {**panel.sampling, name: number}
            elif do == "open":
                panel.open(**{k: message[k] for k in ("model", "device", "dtype") if message.get(k)})
            elif do == "look":
                panel.look()
            elif do == "example":
                panel.use_prompt(message["name"])
            elif do == "chat":
                panel.chat = bool(message["on"])
            elif do == "unmeasure":
                panel.stop_measuring()
            elif do == "dismiss":
                panel.show_problem(None)
            elif do in ("stop", "pin", "save", "measure"):
                getattr(panel, do)()
            else:
                raise OptionError(f"The panel has no action {do!r}.")

    @contextmanager
    def _guard(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as err:
            self._panel.show_problem(Problem.of(err, where))
            if self._panel.strict:
                raise
