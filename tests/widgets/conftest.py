"""A session without a model, for tests of the panel: real jobs, real plans, one worker thread, made-up
tokens.

It has the interface of ``workbench.core.session.Session`` as far as a panel uses it. ``apply_seconds`` and
``step_seconds`` slow it down; every started run and every applied recipe is written down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, sleep
from typing import Any

import pytest

from workbench.core.jobs import Job
from workbench.core.plan import ModelFacts, plan, require, why_not
from workbench.core.report import Collected, Output, build_run
from workbench.engine.params import SamplingParams
from workbench.engine.snapshot import GroupPages, PageSnapshot, SequencePages
from workbench.models.datadir import data_dir
from workbench.models.registry import open_source
from workbench.spec.errors import RequestError
from workbench.spec.events import DraftRecord, Event, RequestEvent, StepEvent, TokenInfo
from workbench.spec.recipe import Recipe

WORDS = (" the", " sky", " is", " blue", " because", " of", " scattering", ".")


class FakeTokenizer:
    chat_template = None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(WORDS[i % len(WORDS)] for i in ids)

    def stream(self) -> Any:
        return FakeStream()


class FakeStream:
    def push(self, ids: Sequence[int]) -> str:
        return FakeTokenizer().decode(ids)


class FakeRequest(Job):
    def __init__(self, prompt: Any, params: SamplingParams, notify: Callable[[Any], None]) -> None:
        super().__init__("request", str(prompt)[:40], notify)
        self.params = params
        self.submitted = self.ready = perf_counter()
        self.request_ids = [f"{self.id}/0"]
        self.output = Output(prompt=str(prompt), prompt_ids=(1, 2, 3), sample=0)
        self.steps: list[StepEvent] = []

    @property
    def text(self) -> str:
        return self.output.text


class FakeSession:
    """Runs nothing, reports everything; the recipe decides nothing but what is drafted."""

    profile = "interactive"

    def __init__(self, recipe: Recipe | None = None, dtype: Any = "bfloat16") -> None:
        self.source = open_source(data_dir() / "models" / "tiny")
        self.facts = ModelFacts("tiny", self.source.config, "fake")
        self.tokenizer = FakeTokenizer()
        self.where = {"dtype": dtype}
        self.plan = require(plan(recipe or Recipe(), self.facts, **self.where))
        self.apply_seconds = self.step_seconds = 0.0
        self.fail_apply: BaseException | None = None
        self.fail_step: Callable[[], None] | None = None
        self.rested = 0
        self.applied: list[Recipe] = []
        self.started: list[tuple[Recipe, Any]] = []
        self._listeners: list[Callable[[Event], None]] = []
        self._lock = threading.Condition()
        self._applying: tuple[Job, Any] | None = None
        self._requests: list[FakeRequest] = []
        self._closed = False
        self._in_place = self.plan
        self._worker = threading.Thread(target=self._work, name="fake-session", daemon=True)
        self._worker.start()

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    def why_not(self, technique: str) -> list[Any]:
        return why_not(self.recipe, technique, self.facts)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def pages(self) -> Any:
        """Two sequences that share their first page; the second page of the first one is open."""
        if not self._requests:
            return None
        sequences = (SequencePages("a", 0, 24, (1, 2)), SequencePages("a", 1, 20, (1, 4)))
        group = GroupPages(16, 10, sequences, {1: 2, 2: 1, 4: 1}, (5,), (2,))
        return PageSnapshot(7, (group,))

    def apply(self, recipe: Recipe) -> Job:
        new = require(plan(recipe, self.facts, **self.where))
        job = Job("live", str(new.recipe), self._emit)
        with self._lock:
            older, self._applying, self.plan = self._applying, (job, new), new
            self._lock.notify_all()
        if older is not None:
            older[0].finish(None, "superseded")
        return job

    def submit(self, prompt: Any, params: SamplingParams | None = None) -> FakeRequest:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        job = FakeRequest(text, params or SamplingParams(), self._emit)
        with self._lock:
            self._requests.append(job)
            self._lock.notify_all()
        return job

    def rest(self) -> Job:
        self.rested += 1
        job = Job("task", "rest", self._emit)
        job.finish()
        return job

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._worker.join(5.0)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._applying or self._requests)
                if self._closed:
                    return
                applying, request = self._applying, self._requests[0] if self._requests else None
            if applying is not None:
                self._do_apply(*applying)
            elif request is not None:
                self._do_request(request)

    def _do_apply(self, job: Job, new: Any) -> None:
        job.start()
        sleep(self.apply_seconds)
        error, self.fail_apply = self.fail_apply, None
        if error is not None:
            job.fail(error)
        else:
            self._in_place = new
            self.applied.append(new.recipe)
            job.finish(new)
        with self._lock:
            if error is not None and self.plan is new:
                self.plan = self._in_place
            if self._applying is not None and self._applying[0] is job:
                self._applying = None

    def _do_request(self, job: FakeRequest) -> None:
        self.started.append((self._in_place.recipe, job.params))
        job.start()
        try:
            state = self._tokens(job)
        except BaseException as err:
            state = "failed"
            job.fail(err)
        with self._lock:
            self._requests.remove(job)
        if state != "failed":
            collected = Collected([job.output], job.steps, job.submitted, job.params.seed)
            job.finish(build_run(collected, self._in_place, state, self.profile, {}), state)

    def _tokens(self, job: FakeRequest) -> Any:
        if not job.output.prompt:
            raise RequestError("The prompt is empty.", hint="Write one.")
        n, drafting = 0, "ngram" in self._in_place.recipe
        while n < job.params.max_tokens:
            if job.token() or self._closed:
                return "cancelled"
            if self._applying is not None:
                return "superseded"
            if self.fail_step is not None:
                fail, self.fail_step = self.fail_step, None
                fail()
            sleep(self.step_seconds)
            n += self._step(job, n, drafting and n > 0)
        return "done"

    def _step(self, job: FakeRequest, at: int, drafting: bool) -> int:
        sources = ("accepted", "corrected") if drafting else ("plain",)
        count = min(len(sources), job.params.max_tokens - at)
        tokens = tuple(TokenInfo(at + i, at + i, s, at, -0.5) for i, s in enumerate(sources[:count]))
        text = self.tokenizer.decode([t.id for t in tokens])
        last = at + count >= job.params.max_tokens
        event = RequestEvent(
            job.request_ids[0], at, perf_counter(), tokens, text, finish="length" if last else None
        )
        draft = DraftRecord(job.request_ids[0], (at, at + 9), (-1, 0), (0,), count, "ngram", "R3")
        kv = 4096 * (at + count)
        step = StepEvent(
            at, perf_counter(), count, 0, 1, 2 if drafting else 0, 1, 0,
            {"forward": 1.0, "schedule": 0.1}, 1, 0, 1,
            {"weights": 1 << 20, "kv_payload": kv, "fragmentation": 512},
            (draft,) if drafting else (), (), ("fake",),
        )  # fmt: skip
        job.output.take(event)
        job.steps.append(step)
        self._emit(event)
        self._emit(step)
        return count

    def _emit(self, event: Event) -> None:
        for listener in list(self._listeners):
            listener(event)


@pytest.fixture
def session() -> Iterator[FakeSession]:
    fake = FakeSession()
    yield fake
    fake.close()


@pytest.fixture
def make_panel(session: FakeSession) -> Iterator[Callable[[], Any]]:
    """``make_panel()`` gives a panel with its widgets, on the fake session."""
    from workbench.widgets import Panel

    made: list[Any] = []

    def make() -> Any:
        made.append(Panel(session, sampling={"max_tokens": 8}, prompt="why"))
        assert made[-1].widget is not None
        return made[-1]

    yield make
    for panel in made:
        panel.close()


@pytest.fixture
def panel(make_panel: Callable[[], Any]) -> Any:
    """A panel with its widgets, on the fake session."""
    return make_panel()


@pytest.fixture
def until() -> Callable[..., bool]:
    """``until(condition)`` waits for it, at most ten seconds."""

    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
        deadline = perf_counter() + seconds
        while perf_counter() < deadline:
            if condition():
                return True
            sleep(0.005)
        return condition()

    return wait
