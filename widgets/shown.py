"""What a panel shows, to read and to set: recipe, prompt, sampling, runs, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.widgets.mover import Mover
from workbench.widgets.problem import Problem
from workbench.widgets.publisher import Publisher


class Shown:
    """The state of :class:`Panel`, which makes the controller behind it."""

    _controller: Mover
    _publisher: Publisher

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

    def _edit(self, **values: Any) -> None:
        c = self._controller
        with c.lock:
            c.state = replace(c.state, **values)
        self._publisher.mark()
