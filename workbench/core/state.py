"""What the worker owns: weight sets, decoder, KV cache, engine, and the jobs running on them.

At most two weight sets stay resident, so that toggling between two is free; KV pages survive a change
that does not touch what shaped them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any

from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv, kv_key
from workbench.core.build_weights import build_weights, weights_key
from workbench.core.jobs import Job
from workbench.core.placed import DraftPlace
from workbench.core.runner import RequestJob
from workbench.engine.engine import Engine
from workbench.engine.kv import KVCache
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress
from workbench.models.source import Source
from workbench.models.tokenizer import Tokenizer
from workbench.spec.errors import Cancelled, WorkbenchError
from workbench.spec.events import Event
from workbench.spec.plan import Plan

RESIDENT_WEIGHT_SETS = 2


class EngineState:
    """Touched by the worker thread only."""

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.plan: Plan | None = None
        self.engine: Engine | None = None
        self.jobs: list[RequestJob] = []
        self.broken: WorkbenchError | None = None  # why there is no engine
        self.resting = False  # the memory was given back; built again when something is to be done
        self.ready = 0.0  # since when the engine is there, in seconds of perf_counter
        self.held: dict[str, int] = {}  # bytes by category, replaced as a whole: other threads read it
        self._decoders: OrderedDict[tuple[str, ...], Decoder] = OrderedDict()
        self._kv: tuple[tuple[object, ...], KVCache] | None = None
        self._place = DraftPlace()
        self._task: tuple[Job, Generator[None, None, Any]] | None = None

    def rebuild(self, plan: Plan, progress: Progress | None, cancel: Cancel) -> None:
        """Make the engine of ``plan``, keeping every part that its recipe does not change.

        If it fails, :meth:`advance` goes on with the plan that ran before. At rest, the plan is only noted.
        """
        if self.resting:
            self.plan = plan
            return
        decoder = self.decoder(plan, progress, cancel)
        key = kv_key(plan, self.source.config)
        if self._kv is not None and self._kv[0] == key:
            kv = self._kv[1]
        else:
            if self._kv is not None and self.plan is not None and weights_key(self.plan) == weights_key(plan):
                self._drop_kv()  # free the old pool before the new one is made
            kv = build_kv(plan, decoder, progress, cancel)
        engine = build_engine(plan, decoder, kv, self.tokenizer.stream, self.tokenizer.eos_ids)
        self._place.settle(engine, plan, progress, cancel)
        if self._kv is not None and self._kv[1] is not kv:
            self._kv[1].close()
        self._kv, self.engine, self.plan = (key, kv), engine, plan
        self.ready = perf_counter()
        self._count()

    def advance(self, emit: Callable[[Event], None]) -> None:
        """One engine step for all request jobs, then hand out and report what happened."""
        self._wake(lambda: all(job.token() for job in self.jobs))
        engine, plan = self.engine, self.plan
        if engine is None or plan is None:
            self.fail_all(self.broken or WorkbenchError("There is no engine.", hint="Apply a recipe."))
            return
        self._add_and_cancel(engine, plan)
        if engine.has_work:
            try:
                step, events = engine.step()
            except BaseException as err:
                self.fail_all(err)
                return
            self.held = {**step.bytes, **self._kept()}
            for job in self.jobs:
                job.take(step, events)
            for event in events:
                emit(event)
            emit(step)
        for job in [j for j in self.jobs if j.complete]:
            job.close(engine, "done")
            self.jobs.remove(job)

    def _add_and_cancel(self, engine: Engine, plan: Plan) -> None:
        for job in list(self.jobs):
            if job.token():
                job.close(engine, "cancelled")
                self.jobs.remove(job)  # only now: if closing fails, the job must still be found and ended
                self._count()
            elif not job.added:
                try:
                    job.add_to(engine, plan, self.ready)
                except WorkbenchError as err:
                    self.jobs.remove(job)
                    job.fail(err)

    def advance_task(self, job: Job, work: Callable[[Job, Engine], Generator[None, None, Any]]) -> bool:
        """One unit of a task; True when it has ended."""
        try:
            if job.token():
                raise Cancelled(f"{job.label} was cancelled.")
            if self._task is None or self._task[0] is not job:
                job.start()
                self._wake(job.token)
                if self.engine is None:
                    raise self.broken or WorkbenchError("There is no engine.", hint="Apply a recipe.")
                self._task = (job, work(job, self.engine))
            next(self._task[1])
            return False
        except StopIteration as end:
            job.finish(end.value)
        except BaseException as err:
            if self._task is not None:
                self._task[1].close()
            job.fail(err)
        self._task = None
        return True

    def rest(self) -> None:
        """Give weights and cache back; what is asked for next builds them again. Requests must have ended."""
        self._drop_kv()
        self._place.close()
        self.resting = True
        self._decoders.clear()
        self._count()

    @property
    def in_task(self) -> bool:
        """A task has begun and not ended: it holds the engine."""
        return self._task is not None

    def _wake(self, cancel: Cancel) -> None:
        """There is an engine again if there was one: after a rest, or when its pool made room in vain."""
        self.resting = False
        if self.engine is None and self.plan is not None:
            self.rebuild(self.plan, None, cancel)

    def supersede(self) -> None:
        """The recipe changes: running requests end with what they have."""
        try:
            while self.jobs:
                self.jobs[0].close(self.engine, "superseded")
                del self.jobs[0]
        except BaseException as err:
            self.fail_all(err)

    def fail_all(self, error: BaseException) -> None:
        """An exception inside a step: every running job ends with it, the next run starts clean."""
        jobs, self.jobs = self.jobs, []
        try:
            if self.engine is not None:
                self.engine.reset()
                self.engine.kv.check()
        except BaseException:  # its books are broken beyond repair: the next run gets a new engine
            self._drop_kv()
        self._count()
        for job in jobs:
            job.fail(error)

    def free(self) -> None:
        """Drop model, cache and engine, and end the drafter's process."""
        self._drop_kv()
        self._place.close()
        self.jobs, self.plan, self._task = [], None, None
        self._decoders.clear()
        self._count()

    def _drop_kv(self) -> None:
        """Give up engine and cache; nothing of it stays on disk."""
        if self._kv is not None:
            self._kv[1].close()
        self.engine, self._kv = None, None

    def _count(self) -> None:
        self.held = {**self.engine.memory(), **self._kept()} if self.engine is not None else self._kept()

    def _kept(self) -> dict[str, int]:
        """Bytes of weight sets that stay resident beside the one in use, so that toggling back is free."""
        used = self.engine.executor.decoder if self.engine is not None else None
        kept = sum(d.weights.nbytes() + d.table_nbytes for d in self._decoders.values() if d is not used)
        return {"weights_kept": kept} if kept else {}

    def decoder(self, plan: Plan, progress: Progress | None, cancel: Cancel) -> Decoder:
        """The decoder of a plan's weight set: a resident one, or built now."""
        key = weights_key(plan)
        decoder = self._decoders.get(key)
        if decoder is None:
            while len(self._decoders) >= RESIDENT_WEIGHT_SETS:
                self._decoders.popitem(last=False)
            decoder = Decoder(self.source.config, build_weights(plan, self.source, progress, cancel))
            self._decoders[key] = decoder
        self._decoders.move_to_end(key)
        return decoder
