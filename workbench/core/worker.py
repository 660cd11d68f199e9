"""The one thread of a session that touches the model: applies recipes, steps the engine, advances tasks.

Everything else only posts to it. The order of its loop is: a new recipe first, then one engine step for
all requests, then one unit of a task. Whatever happens inside, the thread stays alive and every job ends.
It does not know the session, so a session that nobody holds any more can be collected and its worker ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import torch

from workbench.core.jobs import Job
from workbench.core.runner import RequestJob
from workbench.core.state import EngineState
from workbench.engine.engine import Engine
from workbench.spec.errors import SessionClosed
from workbench.spec.events import Event
from workbench.spec.plan import Plan

Listener = Callable[[Event], None]
Task = Callable[[Job, Engine], Generator[None, None, Any]]


class Worker(threading.Thread):
    """Owns ``state``; ``plan`` is the one that runs, or the newest that was posted."""

    def __init__(self, state: EngineState, plan: Plan) -> None:
        super().__init__(name="workbench-session", daemon=True)
        self.state = state
        self.plan = plan
        self.listeners: list[Listener] = []
        self._lock = threading.Condition()
        self._inbox: deque[RequestJob] = deque()
        self._applying: Job | None = None
        self._replaced: list[Job] = []  # recipes that a newer one overtook; the worker tells so
        self._tasks: deque[tuple[Job, Task]] = deque()
        self._rest: Job | None = None
        self._closed = False

    # -- called from any thread -----------------------------------------------------------------------

    def post_plan(self, plan: Plan) -> Job:
        """Switch to another plan; a plan that still waits is superseded."""
        job = Job("live", str(plan.recipe), self.emit)
        with self._lock:
            self._check_open()
            if self._applying is not None:
                self._applying.cancel()
                self._replaced.append(self._applying)
            self._applying, self.plan = job, plan
            self._lock.notify_all()
        return job

    def post_requests(self, job: RequestJob) -> None:
        """Queue a request job."""
        with self._lock:
            self._check_open()
            self._inbox.append(job)
            self._lock.notify_all()

    def post_task(self, label: str, work: Task) -> Job:
        """Queue a task."""
        job = Job("task", label, self.emit)
        with self._lock:
            self._check_open()
            self._tasks.append((job, work))
            self._lock.notify_all()
        return job

    def post_rest(self) -> Job:
        """Give memory back once requests and the task that has begun are over."""
        job = Job("task", "giving memory back", self.emit)
        with self._lock:
            self._check_open()
            older, self._rest = self._rest, job
            self._lock.notify_all()
        if older is not None:
            older.finish(None, "superseded")
        return job

    def cancel_all(self) -> None:
        """Ask all requests and tasks to stop."""
        with self._lock:
            jobs = [*self._inbox, *self.state.jobs, *(j for j, _ in self._tasks)]
            self._lock.notify_all()
        for job in jobs:
            job.cancel()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or running; False when ``timeout`` seconds passed first."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._has_work(), timeout)

    def stop(self) -> None:
        """Cancel everything and end the thread; stopping twice is fine."""
        with self._lock:
            self._closed = True
            applying = self._applying
            self._lock.notify_all()
        if applying is not None:
            applying.cancel()  # building weights stops between layers
        self.cancel_all()
        if self is not threading.current_thread() and self.is_alive():
            self.join(10.0)

    def emit(self, event: Event) -> None:
        """Give an event to every listener; one that fails is dropped, it must not stop the engine."""
        for listener in list(self.listeners):
            try:
                listener(event)
            except Exception:
                with suppress(ValueError):
                    self.listeners.remove(listener)

    # -- the thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until stopped."""
        while True:
            with self._lock:
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    break
                applying, wanted = self._applying, self.plan
                replaced, self._replaced = self._replaced, []
                arrived, self._inbox = list(self._inbox), deque()
                if applying is None:
                    self.state.jobs.extend(arrived)
                else:
                    self._inbox.extendleft(reversed(arrived))
            for job in replaced:
                job.finish(None, "superseded")
            try:
                if applying is not None:
                    self._apply(applying, wanted)
                elif self.state.jobs:
                    with torch.inference_mode():
                        self.state.advance(self.emit)
                elif self._rest is not None and not self.state.in_task:
                    self._give_back()
                elif self._tasks:
                    self._advance_task()
            except BaseException as err:
                self.state.fail_all(err)
        self._shut()

    def _has_work(self) -> bool:
        waiting = self._applying or self._replaced or self._inbox or self._tasks or self._rest
        return bool(waiting or self.state.jobs)

    def _apply(self, job: Job, wanted: Plan) -> None:
        try:
            job.start()
            self.state.supersede()
            with torch.inference_mode():
                self.state.rebuild(wanted, lambda f, what: job.progress(f, 1.0, "", what), job.token)
            with self._lock:
                newest = self._applying is job
            job.finish(wanted if newest else None, "done" if newest else "superseded")
        except BaseException as err:
            with self._lock:
                newest = self._applying is job
                if newest and self.state.plan is not None:
                    self.plan = self.state.plan
            if newest:
                job.fail(err)
                self.state.broken = job.error
            else:
                job.finish(None, "superseded")
        finally:
            with self._lock:
                if self._applying is job:
                    self._applying = None

    def _give_back(self) -> None:
        job = self._rest
        self.state.rest()
        with self._lock:
            if self._rest is job:
                self._rest = None
        if job is not None:
            job.finish()

    def _advance_task(self) -> None:
        job, work = self._tasks[0]
        if self.state.advance_task(job, work):
            with self._lock:
                self._tasks.popleft()

    def _shut(self) -> None:
        closed = SessionClosed("The session was closed.", hint="Open a new one.")
        for job in [*self._inbox, *self.state.jobs, *(j for j, _ in self._tasks)]:
            job.fail(closed)
        for replaced in self._replaced:
            replaced.finish(None, "superseded")
        for last in filter(None, (self._applying, self._rest)):
            last.fail(closed)
        self.state.free()
        with self._lock:  # whoever waits for idleness waits no longer
            self._applying = self._rest = None
            self._replaced.clear()
            self._inbox.clear()
            self._tasks.clear()
            self._lock.notify_all()
        self.listeners.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("This session is closed.", hint="Open a new Session.")
