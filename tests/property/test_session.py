"""A session under people's hands: toggles, prompts, cancels and failures from several threads at once.

No timing is asserted; a watchdog turns a deadlock into a failure.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from workbench.core.jobs import Job
from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import Cancelled, JobFailed, PlanError, RequestError, SessionClosed
from workbench.spec.events import JobEvent, RequestEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

WAIT = 120.0
LIMITS = EngineLimits(kv_pool_tokens=384, max_sequences=4, max_context=96)
TOGGLES = (
    "paged",
    "prefix_cache",
    "ngram:k=3",
    "kv_int8",
    "chunked_prefill:budget=5",
    "kivi:residual=32",
    "verify",
)


class Watcher:
    """Listens to a session: every job starts at most once, ends at most once, and says nothing after."""

    def __init__(self, session: Session) -> None:
        self.states: dict[str, list[str]] = {}
        self.threads: set[int] = set()
        self.ended: set[tuple[str, int]] = set()
        self.faults: list[str] = []
        session.listen(self)

    def __call__(self, event: Any) -> None:
        self.threads.add(threading.get_ident())
        if isinstance(event, JobEvent):
            states = self.states.setdefault(event.job_id, [])
            if states and states[-1] not in ("queued", "running"):
                self.faults.append(f"{event.job_id}: {event.state} after {states[-1]}")
            states.append(event.state)
        elif isinstance(event, RequestEvent):
            at = (event.request_id, event.sample)
            if at in self.ended:
                self.faults.append(f"{at} goes on after its end")
            if event.finish:
                self.ended.add(at)


def hands(session: Session, seed: int, actions: int, jobs: list[Job], faults: list[BaseException]) -> None:
    """One person: random actions, each of which must come back."""
    rng = random.Random(seed)
    mine: list[Job] = []

    def counting(job: Job, engine: Any) -> Any:
        for i in range(20):
            job.progress(i, 20)
            yield
        return "counted"

    try:
        for _ in range(actions):
            what = rng.random()
            if what < 0.35:
                recipe = session.recipe
                id_ = rng.choice(TOGGLES)
                name = id_.partition(":")[0]
                with suppress(PlanError):
                    mine.append(session.apply(recipe.without(name) if name in recipe else recipe.with_(id_)))
            elif what < 0.7:
                params = SamplingParams(
                    max_tokens=rng.randint(0, 12),
                    n=rng.choice((1, 1, 2, 9)),
                    temperature=rng.choice((0.0, 3.0)),
                    ignore_eos=True,
                )
                prompt = [rng.randrange(50) for _ in range(rng.choice((0, 1, 5, 40, 200)))]
                mine.append(session.submit(prompt, params))
            elif what < 0.8:
                mine.append(session.task("count", counting))
            elif what < 0.95 and mine:
                rng.choice(mine).cancel()
            elif what < 0.97:
                session.cancel_all()
            else:
                session.memory()
                session.why_not("kivi")
    except BaseException as err:
        faults.append(err)
    finally:
        jobs.extend(mine)


def together(work: list[tuple[Any, ...]]) -> list[BaseException]:
    faults: list[BaseException] = []
    threads = [threading.Thread(target=hands, args=(*w, faults), daemon=True) for w in work]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT)
        assert not t.is_alive(), "a caller never came back"
    return faults


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "workbench-session"]


@pytest.mark.parametrize("seed", range(3))
def test_random_hands_never_hang_a_session_and_the_last_recipe_wins(model_folder, seed):
    before = len(workers())
    with Session(str(model_folder("llama")), dtype="float32", limits=LIMITS) as session:
        watcher = Watcher(session)
        jobs: list[Job] = []
        faults = together([(session, 100 * seed + i, 70, jobs) for i in range(3)])  # 210 actions
        assert faults == []
        assert len(workers()) == before + 1
        assert session.wait_idle(WAIT)
        assert all(j.ended for j in jobs)
        assert watcher.faults == []
        assert watcher.threads == {session._worker.ident}
        assert session._state.plan is session.plan  # what is shown is what runs
        for job in jobs:
            if job.state == "failed":
                assert isinstance(job.error, RequestError)
            elif job.kind == "request":
                assert job.value is not None or isinstance(job.error, Cancelled)
            if job.kind == "request" and job.state == "done":
                assert all(o["finish"] in ("stop", "length") for o in job.value.outputs)
        session._state.engine.kv.check()
        assert session._state.engine.kv.pools[0].used == 0
        last = session.apply(Recipe.of("paged"))
        last.result(WAIT)
        assert session.generate([1, 2, 3], max_tokens=2).recipe == [{"id": "paged"}]
    assert len(workers()) == before


@pytest.mark.parametrize("seed", range(2))
def test_steps_that_fail_at_random_end_their_jobs_and_nothing_else(model_folder, seed):
    rng = random.Random(seed)
    with Session(str(model_folder("llama")), dtype="float32", limits=LIMITS) as session:
        session.apply(Recipe.of("paged", "prefix_cache", "ngram")).result(WAIT)
        clean = session.generate([1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True).token_ids
        engine = session._state.engine
        real = engine.executor.forward
        engine.executor.forward = lambda *a, **k: real(*a, **k) if rng.random() < 0.8 else 1 // 0
        jobs: list[Job] = []
        for _ in range(40):
            params = SamplingParams(max_tokens=rng.randint(1, 8), ignore_eos=True)
            jobs.append(session.submit([rng.randrange(50) for _ in range(6)], params))
            if rng.random() < 0.5:
                jobs[-1].wait(WAIT)
        assert session.wait_idle(WAIT)
        assert all(j.ended for j in jobs)
        assert {j.state for j in jobs} == {"done", "failed"}
        for job in jobs:
            if job.state == "failed":
                assert isinstance(job.error, JobFailed)
                assert job.error.kind == "ZeroDivisionError"
        engine.executor.forward = real
        assert session._state.engine is engine
        engine.kv.check()
        assert engine.kv.pools[0].used == 0
        assert engine.memory()["draft"] == 0
        run = session.generate([1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True)
        assert run.token_ids == clean


@pytest.mark.parametrize("seed", range(3))
def test_closing_in_the_middle_ends_every_job(model_folder, seed):
    before = len(workers())
    session = Session(str(model_folder("llama")), dtype="float32", limits=LIMITS)
    jobs: list[Job] = []
    closed: list[BaseException] = []
    closer = threading.Timer(0.05 * (seed + 1), session.close)
    closer.start()
    faults = together([(session, 7 * seed + i, 200, jobs) for i in range(2)])
    closer.join(WAIT)
    assert not closer.is_alive()
    closed = [f for f in faults if not isinstance(f, SessionClosed)]
    assert closed == []
    session.close()
    end = time.monotonic() + WAIT
    while len(workers()) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(workers()) == before
    assert all(j.wait(WAIT) for j in jobs)
    assert session.wait_idle(WAIT)
    assert session.memory() == {}


def test_listeners_may_come_go_and_fail_at_any_time(model_folder):
    with Session(str(model_folder("llama")), Recipe.of("paged"), dtype="float32", limits=LIMITS) as session:
        stop = threading.Event()
        faults: list[BaseException] = []

        def fails(event: Any) -> None:
            raise ValueError("broken listener")

        def churn() -> None:
            try:
                while not stop.is_set():
                    off = session.listen(lambda e: None)
                    session.listen(fails)
                    off()
                    off()
            except BaseException as err:
                faults.append(err)

        threads = [threading.Thread(target=churn, daemon=True) for _ in range(2)]
        for t in threads:
            t.start()
        for _ in range(5):
            assert session.generate([1, 2, 3], max_tokens=3, ignore_eos=True).state == "done"
        stop.set()
        for t in threads:
            t.join(WAIT)
        assert faults == []
        with torch.inference_mode():
            session._state.engine.kv.check()


def test_memory_may_be_asked_from_any_thread_at_any_time(model_folder):
    """Each answer is one consistent count: the categories of the KV cache always add up to the same."""
    before = sys.getswitchinterval()
    with Session(str(model_folder("llama")), Recipe.of("paged", "ngram"), dtype="float32") as session:
        session.generate([1, 2, 3], max_tokens=3)
        stop = threading.Event()
        faults: list[BaseException] = []
        totals: set[int] = set()

        def ask() -> None:
            try:
                while not stop.is_set():
                    held = session.memory()
                    kv = [v for k, v in held.items() if k.startswith("kv_") or k == "fragmentation"]
                    totals.add(sum(kv))
            except BaseException as err:
                faults.append(err)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(2)]
        sys.setswitchinterval(1e-6)
        try:
            for t in threads:
                t.start()
            params = [SamplingParams(max_tokens=1 + i % 4, ignore_eos=True) for i in range(30)]
            for _ in range(12):
                session.submit_all([[i, 1, 2, 1, 2] for i in range(30)], params).result(WAIT)
        finally:
            stop.set()
            sys.setswitchinterval(before)
        for t in threads:
            t.join(WAIT)
        assert faults == []
        assert len(totals) == 1
