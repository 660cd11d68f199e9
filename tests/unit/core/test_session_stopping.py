"""Stopping a session's work, on purpose or by a failure: everything ends, everything comes back."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import (
    Cancelled,
    JobFailed,
    SessionClosed,
)
from workbench.spec.events import JobEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

LIMITS = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=128)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
WAIT = 60.0


def test_cancel_keeps_what_there_is(open_session, slow_down, until_running):
    session = open_session("paged")
    slow_down(session)
    job = session.submit("Hello", LONG)
    until_running(job)
    job.cancel()
    run = job.result(WAIT)
    assert (job.state, run.state, run.outputs[0]["finish"]) == ("cancelled", "cancelled", "abort")
    assert 0 < len(run.token_ids) < 100
    assert session._state.engine.kv.pools[0].used == 0


def test_a_kernel_interrupt_stops_the_run_a_cell_waits_for(open_session, slow_down):
    session = open_session("paged")
    slow_down(session)
    other = session.submit("stays", SamplingParams(max_tokens=30, ignore_eos=True))
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    seen = []
    session.listen(lambda e: seen.append(e) if isinstance(e, JobEvent) and e.state == "cancelled" else None)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.generate("Hello", max_tokens=100, ignore_eos=True)
    timer.join()
    assert len(seen) == 1
    assert len(other.result(WAIT).token_ids) == 30
    assert session.generate("Hello", max_tokens=2).state == "done"


def test_tasks_advance_cancel_and_fail_by_themselves(open_session):
    session = open_session("paged")

    def work(job, engine):
        for i in range(10**6):
            job.progress(i, 10**6)
            yield
        return "never"

    def quick(job, engine):
        yield
        return engine.vocab_size

    def broken(job, engine):
        yield
        raise ValueError("bad data")

    long, failing, short = (session.task(n, w) for n, w in (("a", work), ("b", broken), ("c", quick)))
    run = session.generate("Hello", max_tokens=3)  # served between the units of a task
    assert run.state == "done"
    assert not long.ended
    long.cancel()
    with pytest.raises(Cancelled):
        long.result(WAIT)
    assert long.state == "cancelled"
    with pytest.raises(JobFailed, match="bad data"):
        failing.result(WAIT)
    assert short.result(WAIT) == session.facts.config.vocab_size


def test_close_ends_everything_and_frees_the_model(model_folder, slow_down, until_running):
    session = Session(str(model_folder("llama")), Recipe.of("paged"), dtype="float32", limits=LIMITS)
    slow_down(session)
    model = weakref.ref(session._state.engine.executor.decoder)
    jobs = [session.submit("Hello", LONG) for _ in range(3)]
    jobs.append(session.task("t", lambda job, engine: iter(range(10**9))))
    until_running(jobs[0])
    waiting = []
    waiter = threading.Thread(target=lambda: waiting.append(session.wait_idle(None)), daemon=True)
    waiter.start()
    session.close()
    session.close()
    waiter.join(WAIT)
    assert waiting == [True]  # whoever waited for idleness waits no longer
    assert all(j.ended for j in jobs)
    for job in jobs:
        assert job.state in ("failed", "cancelled")
        if job.state == "failed":
            with pytest.raises(SessionClosed):
                job.result(0)
    for call in (
        lambda: session.submit("Hello"),
        lambda: session.apply(Recipe()),
        lambda: session.task("t", lambda job, engine: iter(())),
        lambda: session.generate("Hello"),
    ):
        with pytest.raises(SessionClosed):
            call()
    assert not session._worker.is_alive()
    assert session.memory() == {}
    jobs.clear()
    del job
    gc.collect()
    assert model() is None


def test_close_while_a_recipe_is_being_built(model_folder, monkeypatch):
    import workbench.core.state as state

    begun, real = threading.Event(), state.build_weights

    def slowly(plan, source, progress, cancel):
        begun.set()
        end = time.monotonic() + WAIT
        while not cancel() and time.monotonic() < end:
            time.sleep(0.005)
        return real(plan, source, progress, cancel)

    monkeypatch.setattr(state, "build_weights", slowly)
    session = Session(str(model_folder("llama")), Recipe.of("paged"), dtype="float32", limits=LIMITS)
    job = session.submit("Hello")
    assert begun.wait(WAIT)
    session.close()
    assert not session._worker.is_alive()
    assert session.wait_idle(1.0)
    with pytest.raises(SessionClosed):
        job.result(1.0)


def test_two_sessions_share_a_model_and_nothing_else(open_session):
    a, b = open_session("paged", "prefix_cache"), open_session("paged", "prefix_cache", "kv_int8")
    jobs = [(s, s.submit("Hello there", SamplingParams(max_tokens=8, ignore_eos=True))) for s in (a, b) * 3]
    outs = {s: {tuple(j.result(WAIT).token_ids) for t, j in jobs if t is s} for s in (a, b)}
    assert [len(v) for v in outs.values()] == [1, 1]
    a.close()
    assert b.generate("Hello there", max_tokens=8, ignore_eos=True).state == "done"


def test_an_open_session_does_not_break_the_interpreters_exit(model_folder):
    code = (
        "import sys\nfrom workbench.core.session import Session\n"
        "from workbench.engine.params import SamplingParams\n"
        "s = Session(sys.argv[1], dtype='float32')\n"
        "s.submit('Hello', SamplingParams(max_tokens=200, ignore_eos=True))\nprint('done')\n"
    )
    folder = str(model_folder("llama"))
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


class Held:
    """Stands for a tensor that a failing step allocated."""


@pytest.mark.parametrize("where", ["forward", "commit", "listener"])
def test_nbw_13_an_exception_in_a_step_frees_its_tensors_and_the_next_run_works(open_session, where):
    session = open_session("paged", "prefix_cache", "ngram")
    before = session.generate("Hello", max_tokens=4).token_ids
    engine = session._state.engine
    seen: list[weakref.ref] = []

    def fails(*args, **kwargs):
        big = Held()
        seen.append(weakref.ref(big))
        raise MemoryError("too large")

    if where == "listener":  # a broken listener is dropped, the run goes on
        session.listen(fails)
        assert session.generate("Hello", max_tokens=4).token_ids == before
    else:
        target, name = (engine.executor, "forward") if where == "forward" else (engine.kv, "commit")
        real = getattr(target, name)
        setattr(target, name, fails)
        jobs = [session.submit("Hello", SamplingParams(max_tokens=4)) for _ in range(2)]
        for job in jobs:
            with pytest.raises(JobFailed, match="too large") as err:
                job.result(WAIT)
            assert err.value.kind == "MemoryError"
        setattr(target, name, real)
        del err
        assert session.wait_idle(WAIT)
        assert not engine.alive()  # nothing of them lives on in the engine
        assert engine.kv.pools[0].used == 0
    gc.collect()
    assert seen
    assert [r() for r in seen] == [None] * len(seen)
    assert session.wait_idle(WAIT)
    assert session.generate("Hello", max_tokens=4).token_ids == before
    session._state.engine.kv.check()
    assert session._state.engine.kv.pools[0].used == 0
    assert not session._state.engine.alive()


def test_books_broken_beyond_repair_give_a_new_engine(open_session, slow_down, until_running):
    session = open_session("paged")
    before = session.generate("Hello", max_tokens=4).token_ids
    broken = session._state.engine
    slow_down(session)
    job = session.submit("Hello", LONG)
    until_running(job)
    broken.kv.pools[0].refs[:] = [0] * len(broken.kv.pools[0].refs)  # every release is now one too many
    job.cancel()
    assert job.wait(WAIT)
    assert session.wait_idle(WAIT)
    assert session.generate("Hello", max_tokens=4).token_ids == before
    assert session._state.engine is not broken
    session._state.engine.kv.check()


def test_a_session_nobody_holds_closes_itself(model_folder):
    session = Session(str(model_folder("llama")), dtype="float32", limits=LIMITS)
    assert session.generate("Hello", max_tokens=2).state == "done"
    worker, decoder = session._worker, weakref.ref(session._state.engine.executor.decoder)
    del session
    gc.collect()
    worker.join(WAIT)
    assert not worker.is_alive()
    assert decoder() is None
