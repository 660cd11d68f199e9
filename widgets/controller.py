"""What a panel does, without a widget: one session, one recipe, at most one run in flight.

Every method posts to the session and returns; events come back on the worker's thread. One lock guards the
state. It may be held while the session is called, never the other way round: the session emits events without
holding its own lock.

A changed recipe asks the run in flight to end, and the run starts again once the newest recipe is in place:
however many changes arrive, only the last one is run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from workbench.spec.errors import WorkbenchError
from workbench.spec.events import Event, JobEvent, RequestEvent, StepEvent
from workbench.spec.recipe import Recipe, Use
from workbench.spec.run import Run
from workbench.spec.technique import Scalar
from workbench.widgets.collect import LiveRun
from workbench.widgets.handle import PanelRun
from workbench.widgets.measuring import Measuring
from workbench.widgets.opening import Opening
from workbench.widgets.problem import Problem
from workbench.widgets.state import PanelState
from workbench.widgets.timeline import Timeline

KEPT_RUNS = 20


class Controller:
    """State and actions of a panel. ``changed`` is called, from any thread, whenever something did."""

    def __init__(
        self, session: Any, state: PanelState, changed: Callable[[], None], owns: bool = False
    ) -> None:
        self.session = session
        self.owns = owns  # the session is closed with the panel
        self.lock = threading.RLock()
        self.state = state.of_session(session)
        self.recipes: Timeline[Recipe] = Timeline(session.recipe)
        self.live: LiveRun | None = None
        self.runs: deque[Run] = deque(maxlen=KEPT_RUNS)
        self.history: deque[Run] = deque(maxlen=KEPT_RUNS)  # runs and measurements, as they ended
        self.measured: dict[str, Run] = {}  # quality by place
        self.states: dict[str, PanelState] = {}  # what the panel showed when a run began, by run
        self.measuring = Measuring()
        self.opening: Opening | None = None
        self.wanted: dict[str, str] = {}  # what is being opened: model, device, dtype
        self.pinned: Run | None = None
        self.problem: Problem | None = None
        self.progress = ""  # of the recipe being put in place
        self._changed = changed
        self._applied = session.recipe
        self._applying: Any = None
        self._job: Any = None
        self._request = ""
        self._leaving: dict[str, tuple[Any, PanelRun]] = {}  # stopped for a newer run, not ended yet
        self._handle: PanelRun | None = None
        self._availability: tuple[str, dict[str, str]] = ("", {})
        self._submitted, self._measured_place = self.state, ""
        self._unlisten = session.listen(partial(self._take, session))

    # -- what can be seen -------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The recipe on screen: in place, or about to be."""
        return self.recipes.now

    @property
    def last(self) -> Run | None:
        """The latest run that ended with something to show."""
        return self.runs[-1] if self.runs else None

    @property
    def running(self) -> bool:
        """A run is in flight, or waits for its recipe."""
        return self._handle is not None

    @property
    def switching(self) -> bool:
        """A recipe or a model is being put in place."""
        return self._applying is not None or self.opening is not None

    @property
    def busy(self) -> bool:
        """Something was asked for that has not happened yet."""
        return self.switching or self._handle is not None

    @property
    def place(self) -> str:
        """Model, number format, device and recipe on screen: what is shown of another place is stale."""
        return self.state.place

    @property
    def stale(self) -> bool:
        """What is shown was produced by another recipe or model than the one that is switched on."""
        return self.live is not None and self.live.place != self.place

    def standing_against(self, ids: list[str]) -> dict[str, str]:
        """Why each technique cannot be switched on now, in a sentence; empty for those that can."""
        recipe = self.recipe
        if self._availability[0] != recipe.key:
            found = {
                i: "" if i in recipe else " ".join(dict.fromkeys(c.remedy for c in self.session.why_not(i)))
                for i in ids
            }
            self._availability = (recipe.key, found)
        return self._availability[1]

    # -- the recipe -------------------------------------------------------------------------------------

    def switch(self, technique: str, on: bool, options: dict[str, Scalar]) -> Any:
        """Switch a technique on (with options), change its options, or switch it off; a live job."""
        with self.lock:
            use = self.recipe.get(technique)
            if on:
                merged = {**(dict(use.options) if use is not None else {}), **options}
                return self.apply(self.recipe.with_(Use.of(technique, **merged)))
            return self.apply(self.recipe.without(technique))

    def apply(self, recipe: Recipe) -> Any:
        """Put a recipe in place; restarts a run in flight. Changes nothing if ``Session.apply`` raises."""
        with self.lock:
            job = self._post(recipe)
            self._show_recipe(self.session.recipe)
            return job

    def undo(self, forward: bool = False) -> Any:
        """Back to the recipe before, or ahead again; None when there is none."""
        with self.lock:
            wanted = self.recipes.ahead() if forward else self.recipes.back()
            if wanted is None:
                return None
            job = self._post(wanted)
            (self.recipes.redo if forward else self.recipes.undo)()
            self.state = replace(self.state, recipe=self.recipe)
            return job

    def _post(self, recipe: Recipe) -> Any:
        job = self.session.apply(recipe)
        self.problem, self._applying, self.progress = None, job, "switching"
        self._leave_run()
        self._changed()
        return job

    def _leave_run(self) -> None:
        """The run in flight ends; it starts again once what it waits for is in place."""
        if self._job is not None:
            self._job.cancel()
            self._job, self._request = None, ""  # its late events are of the old recipe
            if self._handle is not None:
                self._handle.restarts += 1

    # -- quality ----------------------------------------------------------------------------------------

    def measure(self, **settings: Any) -> Any:
        """Measure the recipe on screen against plain; a task of the session."""
        with self.lock:
            self.problem = None
            job = self.measuring.start(self.session, self.recipe, **settings)
            self._measured_place = self.place
        self._changed()
        return job

    def _measure_ended(self, job: Any) -> None:
        if job.error is not None and job.state == "failed":
            self.problem = Problem.of(job.error, where="measuring quality")
        elif job.state == "done" and job.value is not None:
            self.measured[self._measured_place] = job.value
            self.history.append(job.value)

    # -- running ----------------------------------------------------------------------------------------

    def run(self) -> PanelRun:
        """Run the prompt with the recipe on screen; a run in flight is stopped first."""
        with self.lock:
            self._stop_run()
            if self._job is not None and self._handle is not None:
                self._leaving[self._job.id] = (self._job, self._handle)
                self._job = None
            self.problem = None
            handle = self._handle = PanelRun(self._stop_handle)
            try:
                if not self.switching:
                    self._submit()
            except BaseException:
                self._handle = None
                raise
            finally:
                self._changed()
            return handle

    def stop(self) -> None:
        """Stop the run in flight, within one engine step, and keep its partial result; without one, what is
        being opened or measured."""
        with self.lock:
            if self.opening is not None:
                self.opening.cancel()
            if not self._stop_run() and self.opening is None:
                self.measuring.cancel()
            self._changed()

    def _stop_run(self) -> bool:
        job, handle = self._job, self._handle
        if job is not None:
            job.cancel()
        elif handle is not None:
            handle.end("cancelled", None)
            self._handle = None
        return job is not None or handle is not None

    def _stop_handle(self, handle: PanelRun) -> None:
        with self.lock:
            if handle is self._handle:
                self.stop()

    def _submit(self) -> None:
        state, recipe = self.state, self.recipe
        params = state.params()
        prompt = [{"role": "user", "content": state.prompt}] if state.chat else state.prompt
        tokenizer = self.session.tokenizer
        self.live = LiveRun(
            place=self.place,
            recipe=str(recipe),
            submitted=perf_counter(),
            total=params.max_tokens * params.n,
            kind=self.session.plan.kind,
            decode=lambda ids: str(tokenizer.decode(ids)),
            uses=recipe.to_json(),
            stream=tokenizer.stream(),
        )
        self._submitted = state
        job = self.session.submit(prompt, params)
        self.live.ready = lambda: float(job.ready)
        self._job, self._request = job, job.request_ids[0]
        if self._handle is not None:
            self._handle.follow(job)

    # -- events, on the worker's thread -----------------------------------------------------------------

    def _take(self, session: Any, event: Event) -> None:
        with self.lock:
            if session is not self.session:
                return  # the session before says its last words
            if isinstance(event, StepEvent):
                if self._job is not None and self.live is not None:
                    self.live.take_step(event)
                    self.live.look_at_pages(event, session.pages)
            elif isinstance(event, RequestEvent):
                if event.request_id == self._request and self.live is not None:
                    self.live.take(event)
            else:
                self._take_job(event)
        self._changed()

    def _take_job(self, event: JobEvent) -> None:
        ended = event.state in ("done", "cancelled", "superseded", "failed")
        if self._applying is not None and event.job_id == self._applying.id:
            if ended:
                self._applied_event(self._applying)
            else:
                self.progress = event.message or "switching"
        elif self._job is not None and event.job_id == self._job.id:
            if ended:
                self._run_ended(self._job)
        elif event.job_id in self._leaving:
            if ended:
                job, handle = self._leaving.pop(event.job_id)
                handle.end("cancelled", job.value, None)
        elif event.kind == "task":
            job = self.measuring.take(event)
            if job is not None:
                self._measure_ended(job)
        elif event.kind == "live" and event.state == "done" and self._applying is None:
            self._follow_session()

    def _applied_event(self, job: Any) -> None:
        """The newest recipe is in place, or could not be put in place."""
        self._applying, self.progress = None, ""
        if job.state == "done":
            self._applied = job.value.recipe
            self._go_on()
        elif job.state == "failed":
            if job.error is not None:
                self.problem = Problem.of(job.error, where=f"switching to {job.label}")
            self._show_recipe(self._applied)
            self._end("failed", None, job.error)

    def _follow_session(self) -> None:
        """Someone else, a cell for instance, applied another recipe to the session."""
        self._applied = self.session.recipe
        self._show_recipe(self._applied)
        self._go_on()

    def _show_recipe(self, recipe: Recipe) -> None:
        self.recipes.push(recipe)
        self.state = replace(self.state, recipe=recipe)

    def _go_on(self) -> None:
        """A run that waits for its recipe starts."""
        if self._handle is not None and self._job is None and not self.switching:
            self._restart()

    def _restart(self) -> None:
        try:
            self._submit()
        except Exception as err:
            self.problem = Problem.of(err, where="starting the run")
            self._end("failed", None, err if isinstance(err, WorkbenchError) else None)

    def _run_ended(self, job: Any) -> None:
        run: Run | None = job.value
        self._job, self._request = None, ""
        if run is not None and run.outputs:
            self.runs.append(run)
            self.history.append(run)
            self.states[run.id] = self._submitted
            for gone in self.states.keys() - {r.id for r in self.history}:
                del self.states[gone]
        if job.error is not None:
            self.problem = Problem.of(job.error, where="running the prompt")
        elif run is not None and run.error is not None:
            self.problem = Problem.from_event(run.error, where="running the prompt")
        state = "cancelled" if job.state == "superseded" else job.state
        self._end(state, run, job.error)

    def _end(self, state: str, run: Run | None, error: WorkbenchError | None) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.end(state, run, error)

    def close(self) -> None:
        """Stop listening; the session stays open."""
        self._unlisten()
        with self.lock:
            opening, self.opening = self.opening, None
            if opening is not None:
                opening.cancel()
            self._stop_run()
            self.measuring.cancel()
            self._changed()
