"""Sessions on a random model, and ways to catch one in the middle of its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from workbench.core import kvtc_calibration
from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

LIMITS = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=128)
WAIT = 60.0


@pytest.fixture
def open_session(model_folder: Callable[[str], Any]) -> Iterator[Callable[..., Session]]:
    """``open_session("paged", "ngram:k=4", numerics=...)``: sessions that are closed at the end."""
    opened = []

    def make(*uses: str, **kwargs: Any) -> Session:
        kwargs = {"dtype": "float32", "limits": LIMITS, **kwargs}
        session = Session(str(model_folder("llama")), Recipe.of(*uses), **kwargs)
        opened.append(session)
        return session

    yield make
    for session in opened:
        session.close()
        assert not session._worker.is_alive()


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[Path]]:
    """A cache folder of the test's own; called, the calibrations that are in it."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return lambda: sorted(tmp_path.glob("calibration/*"))


@pytest.fixture
def slow_down() -> Callable[..., None]:
    """Make every step of a session's present engine take a while, so that there is a middle to interrupt."""

    def slower(session: Session, seconds: float = 0.02) -> None:
        assert session.wait_idle(WAIT)
        engine = session._state.engine
        step = engine.step

        def slow() -> Any:
            time.sleep(seconds)
            return step()

        engine.step = slow  # type: ignore[method-assign]

    return slower


@pytest.fixture
def until_running() -> Callable[[Any], None]:
    """Wait for a job's first text."""

    def wait(job: Any) -> None:
        end = time.monotonic() + WAIT
        while not job.text and time.monotonic() < end:
            time.sleep(0.002)
        assert job.text

    return wait


@pytest.fixture(scope="session")
def talk() -> list[int]:
    """Ids of a conversation that fills four pages of 16 and part of a fifth."""
    return [4 + (7 * i) % 50 for i in range(75)]


@pytest.fixture(scope="session")
def answer(talk: list[int]) -> Callable[..., tuple[list[int], int]]:
    """``answer(session, ids, salt=...)``: what follows the conversation, and how much of it was cached."""

    def asked(session: Session, ids: Sequence[int] = talk, salt: str = "") -> tuple[list[int], int]:
        run = session.submit(ids, SamplingParams(max_tokens=6), salt=salt).result()
        return run.token_ids, run.outputs[0]["cached_tokens"]

    return asked


@pytest.fixture(scope="module")
def short_calibrations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for the module, with short calibration sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(kvtc_calibration, "LENGTH", 64)
        yield
