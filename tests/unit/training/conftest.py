"""What trainings of heads on random models share: a model opened once, a small recipe, short answers.

A training is judged by what it does, on as little as shows it: data of a few short conversations, and answers
of the finished head that end early (a random model hardly ever ends by itself).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from workbench.training.heads import conversations, evaluate
from workbench.training.heads.conversations import Making
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target, open_target

ANSWER = 24
"""Tokens of an answer by which a finished head is measured."""


@pytest.fixture(scope="session")
def small_data() -> DataSettings:
    """A few conversations of a few tokens."""
    return DataSettings(tokens=60, questions=4, making=Making(question=8, answer=16))


@pytest.fixture(scope="session")
def target(model_folder: Callable[[str], Path]) -> Target:
    """A random model opened once, with ordinary kernels."""
    return open_target(model_folder("llama"), dtype="float32", numerics="pinned")


@pytest.fixture
def cache(fresh_cache: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, where data, heads and checkpoints are kept."""
    folder = fresh_cache(tmp_path / "cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished heads are measured on :data:`ANSWER` tokens, and a command's conversations are small."""
    real = evaluate.in_engine

    def brief(target: Target, use: Any, prompts: Any, params: Any, cancel: Any = None) -> Any:
        return real(target, use, prompts, replace(params, max_tokens=ANSWER), cancel)

    monkeypatch.setattr(evaluate, "in_engine", brief)
    monkeypatch.setattr(conversations, "Making", partial(Making, question=8, answer=16))
