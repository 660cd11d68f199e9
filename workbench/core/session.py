"""A session: one model, one device, exactly one worker thread.

Callers (cells, widget callbacks, scripts) only post work and wait or listen; the worker owns the model,
the engine and the KV cache, steps the engine while requests run, and advances tasks in between. Callbacks
may come from any thread. An exception ends its job, never the session.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from workbench.core.jobs import CancelToken, Job
from workbench.core.plan import ModelFacts, plan, require, why_not
from workbench.core.runner import Requested, RequestJob
from workbench.core.state import EngineState
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.seams import LogitsMask
from workbench.models.chat import Message
from workbench.models.decoder import Decoder
from workbench.models.progress import Progress
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelNotFound, OptionError, RequestError, SamplingError, SessionClosed
from workbench.spec.events import Event
from workbench.spec.plan import Conflict, DType, EngineLimits, Numerics, Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

Listener = Callable[[Event], None]
Task = Callable[[Job, Engine], Generator[None, None, Any]]
_open_sessions: WeakSet[Session] = WeakSet()


class Session:
    """Runs recipes on a model.

    ``model`` is a name of the registry or a folder (never downloaded here: ``workbench fetch``).
    ``limits`` sizes the KV pool and the batch. Use it as a context manager, or call :meth:`close`.
    Raises :class:`ModelNotFound` and other :class:`ModelError` s when the model cannot be opened, and
    :class:`PlanError` when the first recipe does not fit.
    """

    def __init__(
        self,
        model: str,
        recipe: Recipe | None = None,
        *,
        dtype: DType = "bfloat16",
        numerics: Numerics = "fast",
        device: str = "cpu",
        limits: EngineLimits | None = None,
        threads: int | None = None,
        profile: str = "interactive",
    ) -> None:
        if not isinstance(model, str | Path):
            raise ModelNotFound(f"{model!r} is no model.", hint="Give a name or a folder.")
        self.source = open_source(model)
        self.tokenizer = load_tokenizer(model)
        self.facts = ModelFacts(str(model), self.source.config, self.source.fingerprint)
        self.profile = profile
        self._where: dict[str, Any] = {
            "dtype": dtype,
            "numerics": numerics,
            "device": device,
            "limits": limits,
        }
        self._plan = require(plan(recipe or Recipe(), self.facts, **self._where))
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise OptionError(f"device = {device!r}, but there is no CUDA device here.", hint="Choose cpu.")
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise OptionError(f"threads = {threads!r} must be a whole number of at least 1.")
        self._listeners: list[Listener] = []
        self._lock = threading.Condition()
        self._inbox: deque[RequestJob] = deque()
        self._applying: Job | None = None
        self._replaced: list[Job] = []  # recipes that a newer one overtook; the worker tells so
        self._tasks: deque[tuple[Job, Task]] = deque()
        self._closed = False
        if threads is not None:
            torch.set_num_threads(threads)
        self._state = EngineState(self.source, self.tokenizer)
        self._worker = threading.Thread(target=self._work, name="workbench-session", daemon=True)
        self._worker.start()
        _open_sessions.add(self)
        self._post_apply(self._plan)

    # -- what callers use ------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that is running, or about to."""
        return self._plan

    @property
    def recipe(self) -> Recipe:
        """The recipe that is running, or about to."""
        return self._plan.recipe

    def why_not(self, technique_id: str) -> list[Conflict]:
        """What stands against switching a technique on now; empty when nothing does."""
        return why_not(self.recipe, technique_id, self.facts, **self._where)

    def apply(self, recipe: Recipe) -> Job:
        """Switch to another recipe; rebuilds only what differs. Returns a *live* job.

        Raises :class:`PlanError`, :class:`UnknownTechnique` or :class:`OptionError` at once and changes
        nothing if the recipe does not fit. Requests in flight finish their step and end as *superseded*
        with what they have. A newer recipe supersedes one that still waits.
        """
        return self._post_apply(require(plan(recipe, self.facts, **self._where)))

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mask: LogitsMask | None = None,
        salt: str = "",
        label: str = "",
    ) -> RequestJob:
        """Queue one prompt (text, token ids, or chat messages); the *request* job's result is a :class:`Run`.

        Errors of the request itself (empty, too long, can never fit) end that job only.
        """
        return self.submit_all([prompt], [params or SamplingParams()], mask=mask, salt=salt, label=label)

    def submit_all(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Message]],
        params: Sequence[SamplingParams],
        *,
        mask: LogitsMask | None = None,
        salt: str = "",
        label: str = "",
    ) -> RequestJob:
        """Queue several prompts as one batch with one :class:`Run` as result.

        Raises :class:`RequestError` when a prompt or its settings are of a wrong kind.
        """
        if not prompts or len(prompts) != len(params):
            raise RequestError(
                f"There are {len(prompts)} prompts and {len(params)} sampling settings.",
                hint="Give one SamplingParams per prompt, and at least one prompt.",
            )
        requested = [
            Requested.of(p, s, self.tokenizer, mask, salt) for p, s in zip(prompts, params, strict=True)
        ]
        job = RequestJob(requested, label or requested[0].text[:40], self._emit, self)
        with self._lock:
            self._check_open()
            self._inbox.append(job)
            self._lock.notify_all()
        return job

    def generate(self, prompts: str | Sequence[Any], **sampling: Any) -> Run:
        """Generate and wait. ``prompts`` is a text, chat messages, or a list of texts.

        Keywords are those of :class:`SamplingParams`.

        With several prompts, prompt ``i`` uses ``seed + i``. An interrupt cancels the run.
        """
        several = isinstance(prompts, list | tuple) and bool(prompts)
        items = list(prompts) if several and isinstance(prompts[0], str | list | tuple) else [prompts]
        known = {f.name for f in fields(SamplingParams)}
        for name in sampling.keys() - known:
            raise SamplingError(f"{name} is no sampling setting.", hint=f"Known: {', '.join(sorted(known))}.")
        first = SamplingParams(**sampling)
        params = [replace(first, seed=first.seed + i) for i in range(len(items))]
        run: Run = self.submit_all(items, params).result()
        return run

    def task(self, label: str, work: Task) -> Job:
        """Queue long work: the generator ``work(job, engine)`` is advanced by one ``yield`` between steps.

        Its return value becomes the job's result; cancelling takes effect at the next ``yield``.
        """
        job = Job("task", label, self._emit)
        with self._lock:
            self._check_open()
            self._tasks.append((job, work))
            self._lock.notify_all()
        return job

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Receive every event, on the worker's thread; returns a function that stops it.

        A listener must be quick and must not wait for jobs of this session.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def cancel_all(self) -> None:
        """Stop everything that is queued or running; partial results are kept."""
        with self._lock:
            jobs = [*self._inbox, *self._state.jobs, *(j for j, _ in self._tasks)]
            self._lock.notify_all()
        for job in jobs:
            job.cancel()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no job is queued or running; False when ``timeout`` seconds passed first."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._has_work(), timeout)

    def decoder(self, plan: Plan, progress: Progress, cancel: CancelToken) -> Decoder:
        """The decoder of a plan's weight set, built if not resident. For tasks, on the worker's thread."""
        return self._state.decoder(plan, progress, cancel)

    def memory(self) -> dict[str, int]:
        """Bytes held by category, as of the last step or change."""
        return dict(self._state.held)

    def close(self) -> None:
        """Cancel everything, end the worker, free the model and the cache. Closing twice is fine."""
        with self._lock:
            self._closed = True
            applying = self._applying
            self._lock.notify_all()
        if applying is not None:
            applying.cancel()  # building weights stops between layers
        self.cancel_all()
        if self._worker is not threading.current_thread():
            self._worker.join(10.0)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the worker --------------------------------------------------------------------------------

    def _post_apply(self, new: Plan) -> Job:
        job = Job("live", str(new.recipe), self._emit)
        with self._lock:
            self._check_open()
            if self._applying is not None:
                self._applying.cancel()
                self._replaced.append(self._applying)
            self._applying, self._plan = job, new
            self._lock.notify_all()
        return job

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    break
                applying, wanted = self._applying, self._plan
                replaced, self._replaced = self._replaced, []
                arrived, self._inbox = list(self._inbox), deque()
                if applying is None:
                    self._state.jobs.extend(arrived)
                else:
                    self._inbox.extendleft(reversed(arrived))
            for job in replaced:
                job.finish(None, "superseded")
            try:
                if applying is not None:
                    self._apply(applying, wanted)
                elif self._state.jobs:
                    with torch.inference_mode():
                        self._state.advance(self._emit)
                elif self._tasks:
                    self._advance_task()
            except BaseException as err:
                self._state.fail_all(err)
        self._shut()

    def _has_work(self) -> bool:
        return bool(self._applying or self._replaced or self._inbox or self._state.jobs or self._tasks)

    def _apply(self, job: Job, wanted: Plan) -> None:
        try:
            job.start()
            self._state.supersede()
            with torch.inference_mode():
                self._state.rebuild(wanted, lambda f, what: job.progress(f, 1.0, "", what), job.token)
            with self._lock:
                newest = self._applying is job
            job.finish(wanted if newest else None, "done" if newest else "superseded")
        except BaseException as err:
            with self._lock:
                newest = self._applying is job
                if newest and self._state.plan is not None:
                    self._plan = self._state.plan
            if newest:
                job.fail(err)
                self._state.broken = job.error
            else:
                job.finish(None, "superseded")
        finally:
            with self._lock:
                if self._applying is job:
                    self._applying = None

    def _advance_task(self) -> None:
        job, work = self._tasks[0]
        if self._state.advance_task(job, work):
            with self._lock:
                self._tasks.popleft()

    def _shut(self) -> None:
        closed = SessionClosed("The session was closed.", hint="Open a new one.")
        for job in [*self._inbox, *self._state.jobs, *(j for j, _ in self._tasks)]:
            job.fail(closed)
        for replaced in self._replaced:
            replaced.finish(None, "superseded")
        if self._applying is not None:
            self._applying.fail(closed)
        self._state.free()
        with self._lock:  # whoever waits for idleness waits no longer
            self._applying = None
            self._replaced.clear()
            self._inbox.clear()
            self._tasks.clear()
            self._lock.notify_all()
        self._listeners.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("This session is closed.", hint="Open a new Session.")

    def _emit(self, event: Event) -> None:
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                with suppress(ValueError):
                    self._listeners.remove(listener)


@atexit.register
def _close_all() -> None:
    """A worker still inside a kernel while the interpreter is torn down would abort the process."""
    for session in list(_open_sessions):
        session.close()
