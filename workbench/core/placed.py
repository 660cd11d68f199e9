"""The process that a session's drafter sits in: at most one, ended with the session or when nobody needs it.

Started when the engine that wants it was built, so that the first draft does not wait for it; kept when a
recipe changes and the same drafter is wanted, of a file that is what it was. If it dies, decoding goes on
without drafts, and says so.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

from workbench.core.two_places import DraftSetup, start_drafter
from workbench.engine.engine import Engine
from workbench.models.progress import Cancel, Progress
from workbench.spec.plan import Plan
from workbench.speculative.placement.mirror_worker import Windows
from workbench.speculative.placement.placed import Place, PlacedDrafter
from workbench.speculative.placement.process_link import ProcessLink


class DraftPlace:
    """Touched by whoever owns the engine, from one thread."""

    def __init__(self) -> None:
        self._setup: DraftSetup | None = None
        self._link: ProcessLink | None = None
        self._numbers = itertools.count(1)

    @property
    def link(self) -> ProcessLink | None:
        """The way to the process, if there is one."""
        return self._link

    def settle(
        self, engine: Engine, plan: Plan, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> None:
        """Give the idle engine's drafter its process, if it wants one; end one that is not wanted.

        Raises :class:`OptionError` for a device that is not there, :class:`JobFailed` where the process does
        not start, :class:`Cancelled`.
        """
        drafter = engine.drafting.drafter
        if not isinstance(drafter, PlacedDrafter) or drafter.wanted.where != "process":
            self.close()
            return
        place = drafter.wanted
        setup = setup_of(plan, place)
        if self._link is None or not self._link.alive or setup != self._setup:
            self.close()
            if progress is not None:
                progress(0.0, "starting the drafter's process")
            self._link = start_drafter(setup, cancel=cancel or (lambda: False))
            self._setup = setup
        delay = (lambda: place.delay) if place.delay else None
        self._link.to_drafter = self._link.to_target = delay
        drafter.place(self._link, self._numbers)
        name = f"draft:{drafter.name}"
        engine.path = tuple(f"{name}:process" if part == name else part for part in engine.path)

    def close(self) -> None:
        """End the process, if there is one; returns when it is gone."""
        if self._link is not None:
            self._link.close()
        self._link = self._setup = None


def setup_of(plan: Plan, place: Place) -> DraftSetup:
    """What the process is told: the model of the plan, in its precision, on one thread."""
    made = DraftSetup(
        plan.model,
        place.layers,
        plan.dtype,
        device=place.device,
        cores=last_core() if place.pin else (),
        head="" if place.head is None else place.head.digest,
        vocab=place.vocab,
    )
    if isinstance(place.how, Windows):
        return replace(made, windows=place.how)
    return replace(made, growth=place.how)


def last_core() -> tuple[int, ...]:
    """The last of the cores that may be used; none where there is one alone, or the system cannot bind."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return tuple(cores[-1:]) if len(cores) > 1 else ()
