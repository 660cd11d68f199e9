"""A controller that can change its session: another model, device or number format under the same panel.

The session before gives its memory to the new one, if it is the panel's own; recipe, prompt, sampling and
history stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from workbench.spec.errors import WorkbenchError
from workbench.widgets.controller import Controller
from workbench.widgets.opening import Opening
from workbench.widgets.problem import Problem

ROOM_S = 30.0  # seconds to wait for memory at most; what still holds it then, as somebody's task, keeps it


class Mover(Controller):
    """A :class:`Controller` with :meth:`open`."""

    def open(self, make: Callable[[], Any], wanted: dict[str, str]) -> Opening:
        """Replace the session by the one ``make`` builds; a run in flight starts again on it."""
        label = " · ".join(wanted.values())
        with self.lock:
            before = self.opening
            if before is not None:
                before.cancel()
            self.problem, self.wanted = None, wanted
            self._leave_run()
            self.measuring.cancel()
            room = partial(self._make_room, before, self.session if self.owns else None)
            opening = self.opening = Opening(label, make, room, self._opened, self._changed)
            opening.start()
        self._changed()
        return opening

    @staticmethod
    def _make_room(before: Opening | None, session: Any) -> None:
        """In the opening's thread: wait until an opening before it and the session in place hold nothing."""
        if before is not None:
            before.wait(ROOM_S)
        if session is not None:
            session.rest().wait(ROOM_S)

    def _opened(self, opening: Opening, session: Any, error: BaseException | None) -> None:
        """In the opening's thread: take the new session over, or stay where we are."""
        unwanted = session  # a newer opening, or the panel's end, came first
        with self.lock:
            if opening is self.opening:
                self.opening, self.wanted, unwanted = None, {}, None
                if session is not None:
                    unwanted = self.session if self.owns else None
                    self._adopt(session)
                else:
                    if opening.state == "failed" and error is not None:
                        self.problem = Problem.of(error, where=f"opening {opening.label}")
                    self._end(opening.state, None, opening.error)
        if unwanted is not None:
            unwanted.close()  # not under the lock: its worker may be waiting for it
        self._changed()

    def _adopt(self, session: Any) -> None:
        self._unlisten()
        self.measuring.cancel()
        recipe, self.owns = self.recipe, True
        self.state = self.state.of_session(session, before=self.session)
        self.session, self._applied, self._applying = session, session.recipe, None
        self._availability = ("", {})
        self._unlisten = session.listen(partial(self._take, session))
        self._show_recipe(session.recipe)
        try:
            if recipe.key != session.recipe.key:  # switched while the session was being opened
                self.apply(recipe)
        except WorkbenchError as err:
            self.problem = Problem.of(err, where=f"switching to {recipe}")
        if self._applying is None:
            self._go_on()
