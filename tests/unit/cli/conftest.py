"""Commands run in this process: their status, their stdout, their stderr, and a run store of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workbench.cli.main import main


@dataclass
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout as the one JSON object that it must be; constants that JSON lacks are refused."""

        def refuse(name: str) -> Any:
            raise ValueError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A command may set variables for its own process (``--threads``): the next test is another process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run store that belongs to the test."""
    path = tmp_path / "runs.db"
    monkeypatch.setenv("WORKBENCH_RUNS", str(path))
    return path


@pytest.fixture
def workbench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """``workbench("run", "--json", ...)``."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        caught = capsys.readouterr()
        return Done(status, caught.out, caught.err)

    return call
