"""Jobs: one end each, whoever asks; errors carry no frames."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from workbench.core.jobs import Job
from workbench.spec.errors import Cancelled, InvariantError, JobFailed
from workbench.spec.events import JobEvent


@pytest.fixture
def events() -> list[JobEvent]:
    return []


def test_a_job_ends_once(events):
    job = Job("task", "x", events.append)
    job.start()
    job.finish(1)
    job.finish(2, "cancelled")
    job.fail(RuntimeError("late"))
    job.start()
    assert (job.state, job.value, job.error) == ("done", 1, None)
    assert [e.state for e in events] == ["running", "done"]
    assert job.result(0) == 1


def test_ends_from_many_threads_agree(events):
    for _ in range(50):
        job = Job("live", "x", events.append)
        gate = threading.Barrier(4)

        def end(i: int, job: Job = job, gate: threading.Barrier = gate) -> None:
            gate.wait()
            if i == 0:
                job.start()
            elif i == 1:
                job.finish(i, "superseded")
            else:
                job.finish(i)

        threads = [threading.Thread(target=end, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10)
        assert job.ended
        assert job.state in ("superseded", "done")
        assert (job.value == 1) == (job.state == "superseded")


def test_a_start_that_loses_the_race_leaves_the_end_alone(events):
    """Superseded between the worker's look at it and its first move."""
    job = Job("live", "x", events.append)
    inside, go = threading.Event(), threading.Event()
    real = job._lock

    class Slow:
        def __enter__(self):
            if threading.current_thread().name == "worker":
                inside.set()
                go.wait(10)
            return real.__enter__()

        def __exit__(self, *exc):
            return real.__exit__(*exc)

    job._lock = Slow()  # type: ignore[assignment]
    worker = threading.Thread(target=job.start, name="worker")
    worker.start()
    assert inside.wait(10)
    job.finish(None, "superseded")
    go.set()
    worker.join(10)
    assert job.state == "superseded"
    assert [e.state for e in events] == ["superseded"]


def test_waiting_gives_up_in_time_and_results_raise(events):
    job = Job("task", "slow", events.append)
    assert not job.wait(0.01)
    with pytest.raises(TimeoutError, match="slow"):
        job.result(0.01)
    job.fail(InvariantError("broken"))
    with pytest.raises(InvariantError):
        job.result(0)
    assert events[-1].error == {"error": "InvariantError", "message": "broken", "hint": ""}


def test_cancelled_is_a_state_of_its_own(events):
    job = Job("task", "x", events.append)
    job.fail(Cancelled("stopped"))
    assert job.state == "cancelled"
    with pytest.raises(Cancelled):
        job.result(0)


class Big:
    """Stands for a tensor."""


@pytest.mark.parametrize("kind", ["foreign", "own", "chained", "from none"])
def test_nbw_13_an_error_keeps_no_frame_alive(events, kind):
    job = Job("task", "x", events.append)
    seen: list[weakref.ref] = []

    def inner() -> None:
        big = Big()
        seen.append(weakref.ref(big))
        raise MemoryError("too large")

    def outer() -> None:
        try:
            inner()
        except MemoryError as err:
            if kind == "chained":
                raise InvariantError("books") from err
            if kind == "from none":
                raise InvariantError("books") from None
            raise

    try:
        if kind == "own":
            big = Big()
            seen.append(weakref.ref(big))

            def fails(held: Big = big) -> None:
                raise InvariantError(f"{type(held).__name__}")

            del big
            try:
                fails()
            finally:
                del fails
        else:
            outer()
    except (MemoryError, InvariantError) as err:
        job.fail(err)
    gc.collect()
    assert [r() for r in seen] == [None]
    assert job.state == "failed"
    if kind == "foreign":
        assert isinstance(job.error, JobFailed)
        assert job.error.kind == "MemoryError"
        assert "inner" in job.error.traceback_text
        assert "too large" in str(job.error)
