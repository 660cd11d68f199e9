"""The publisher: many changes, few pictures, the last one shown."""

from __future__ import annotations

import threading
from time import perf_counter, sleep
from typing import Any

from workbench.widgets.publisher import Publisher


def test_a_burst_from_many_threads_is_shown_a_few_times_and_ends_with_the_latest() -> None:
    seen: list[tuple[float, int]] = []
    value = 0
    publisher = Publisher(lambda: seen.append((perf_counter(), value)))

    def burst() -> None:
        nonlocal value
        for _ in range(200):
            value += 1
            publisher.mark()
            sleep(0.0005)

    threads = [threading.Thread(target=burst) for _ in range(4)]
    start = perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    spent = perf_counter() - start
    assert publisher.flush()
    assert seen[-1][1] == value
    assert len(seen) <= spent * 10 + 3  # at most ten a second
    publisher.close()


def test_a_picture_that_fails_does_not_end_it(caplog: Any) -> None:
    calls: list[int] = []

    def show() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("broken view")

    publisher = Publisher(show)
    publisher.mark()
    assert publisher.flush()
    publisher.mark()
    assert publisher.flush()
    assert (len(calls), publisher.failures) == (2, 1)
    assert "could not be drawn" in caplog.text
    publisher.close()


def test_its_thread_is_gone_after_closing() -> None:
    publisher = Publisher(lambda: None)
    publisher.mark()
    assert publisher.flush()
    publisher.close()
    publisher.mark()
    assert not any(t.name == "workbench-publisher" and t is publisher._thread for t in threading.enumerate())
