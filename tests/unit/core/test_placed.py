"""A session's drafter in a process of its own: one, kept while it is wanted, gone with the session."""

from __future__ import annotations

import gc
import os
import signal

import psutil
import pytest
import torch

from workbench.core.placed import last_core
from workbench.core.session import Session
from workbench.spec.errors import PlanError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

LIMITS = EngineLimits(kv_pool_tokens=512, max_context=128)
TEXT = "def area(width, height):\n    return width"
ASKED = {"max_tokens": 24, "ignore_eos": True}


def children() -> dict[int, psutil.Process]:
    return {p.pid: p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}


def test_one_process_follows_the_recipe_and_ends_with_the_session() -> None:
    before = set(children())

    def drafters() -> set[int]:
        return set(children()) - before

    with Session("tiny", limits=LIMITS, dtype="float32", numerics="pinned") as session:
        plain = session.generate(TEXT, **ASKED)
        assert not drafters()
        session.apply(Recipe.of("swiftspec:layers=3")).result(timeout=120)
        (first,) = drafters()
        drafted = session.generate(TEXT, **ASKED)
        assert drafted.token_ids == plain.token_ids
        assert "draft:swiftspec:process" in drafted.path and drafted.memory["draft"] > 0
        assert drafted.acceptance is not None
        session.apply(Recipe.of("swiftspec:layers=3,budget=4,delay=2", "paged")).result(timeout=120)
        assert drafters() == {first}  # the same drafter serves
        assert session.generate(TEXT, **ASKED).token_ids == plain.token_ids
        os.kill(first, getattr(signal, "SIGKILL", signal.SIGTERM))
        assert not psutil.wait_procs([psutil.Process(first)] if psutil.pid_exists(first) else [], 10)[1]
        alone = session.generate(TEXT, **ASKED)
        assert alone.token_ids == plain.token_ids
        assert any("without drafts" in note for note in alone.notes)
        session.apply(Recipe.of("mirror_sd:layers=3,place=here")).result(timeout=120)
        here = session.generate(TEXT, **ASKED)
        assert here.token_ids == plain.token_ids and "draft:mirror_sd" in here.path
        assert not drafters() and not any("without drafts" in note for note in here.notes)
        session.apply(Recipe.of("mirror_sd:layers=3,pin=false")).result(timeout=120)
        assert len(drafters()) == 1
        assert session.generate(TEXT, **ASKED).token_ids == plain.token_ids
        session.rest().result(timeout=60)
        assert not drafters()
    gc.collect()
    assert not drafters()


@pytest.mark.parametrize("use", ["swiftspec:layers=3", "mirror_sd:layers=3,delay=7"])
def test_a_seeded_run_that_matches_samples_says_what_the_plain_run_says(use: str) -> None:
    """Rule R4 with noise of seed and position, whenever the messages of another process arrive."""
    asked = {**ASKED, "temperature": 0.8, "seed": 3}
    with Session("tiny", limits=LIMITS, dtype="float64", numerics="pinned") as session:
        plain = session.generate(TEXT, **asked)
        session.apply(Recipe.of(use, "verify:rule=r4")).result(timeout=120)
        drafted = session.generate(TEXT, **asked)
        assert drafted.token_ids == plain.token_ids
        assert drafted.acceptance is not None and drafted.acceptance["drafted"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("use", ["swiftspec:layers=3,device=cuda", "mirror_sd:layers=3,device=cuda"])
def test_a_device_that_is_not_there_is_refused_by_the_plan(use: str) -> None:
    with pytest.raises(PlanError, match="device = cuda: there is none"):
        Session("tiny", limits=LIMITS, recipe=Recipe.of(use))


def test_the_last_core_is_left_to_the_drafter_where_there_are_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 1, 2}, raising=False)
    assert last_core() == (4,)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert last_core() == ()
    monkeypatch.delattr(os, "sched_getaffinity")
    assert last_core() == ()
