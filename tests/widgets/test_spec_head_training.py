"""A training on screen: it stops where it is told, goes on to the same bits, and shows what it learnt."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.models.cache import cache_dir
from workbench.spec.errors import Cancelled, StorageError
from workbench.training.heads.conversations import Making
from workbench.training.heads.eagle import EagleShape
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target, open_target
from workbench.widgets.spec_views import (
    HeadTraining,
    curve_figure,
    drop_cache,
    lineage,
    own_cache,
    recorded_curve,
)
from workbench.widgets.spec_views.head_training_live import drawing

DATA = DataSettings(tokens=60, questions=4, making=Making(question=8, answer=16))
WAIT = 250


@pytest.fixture(scope="module")
def target(model_folder: Callable[[str], Path]) -> Target:
    return open_target(model_folder("llama"), dtype="float32", numerics="pinned")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


def made(target: Target, steps: int = 6) -> HeadTraining:
    return HeadTraining(
        target, DATA, EagleShape(steps=2, vocab=200), Schedule(steps=steps, batch=4, look_every=2), prompts=0
    )


def test_stopped_and_started_again_it_ends_with_the_same_bits(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, until in (("once", 0), ("twice", 3)):
        monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / name))
        training = made(target).start(until=until).wait(WAIT)
        if until:
            assert (training.state, training.stops) == ("stopped", [3]) and training.curve[-1]["step"] == 2
            assert training.words == "stopped at step 3 of 6"
            with pytest.raises(Cancelled, match="stopped"):
                training.result(WAIT)
            training.start().wait(WAIT)
        assert training.state == "done" and [p["step"] for p in training.curve] == [2, 4, 6]
        found.append((training.result(WAIT).tensors(), training.curve))
    (once, curve), (twice, curve_again) = found
    assert curve == curve_again
    assert once.keys() == twice.keys() and all(torch.equal(once[n], twice[n]) for n in once)


def test_what_it_learnt_is_shown_while_it_learns(target: Target, fresh: None) -> None:
    training = made(target)
    box, seen = training.live(), []
    assert (
        box._go.description == "start"
        and "not begun" in box._words.value
        and not box._go.disabled
        and box._stop.disabled
    )
    training.listen(lambda: seen.append(len(training.curve)))
    training.start().wait(WAIT)
    assert {0, 1, 2, 3} <= set(seen) and box._bar.value == 1.0
    assert "done: 6 steps" in box._words.value and box._go.disabled and box._stop.disabled
    assert box._curve.value.count("<polyline") == 2
    names = [t.name for t in training.figure().data]
    assert names == ["k = 1", "k = 2"]
    assert [r[0] for r in training.table().rows] == [2, 4, 6]
    assert training.start().state == "done"  # there is nothing to go on with
    assert box._repr_mimebundle_()["text/plain"] == "Training: done: 6 steps"


def test_the_buttons_stop_it_and_go_on(target: Target, fresh: None) -> None:
    training, at = made(target, steps=400), threading.Event()
    box = training.live()
    training.listen(lambda: at.set() if training.curve else None)
    box._go.click()
    assert at.wait(WAIT)
    box._stop.click()
    assert training.wait(WAIT).state == "stopped" and 0 < training.stops[0] < 400
    assert not box._go.disabled and box._bar.bar_style == "warning" and box._go.description == "go on"
    (line,) = training.figure().layout.shapes if training.curve[-1]["step"] >= training.stops[0] else (None,)
    assert line is None or line.line.dash == "dot"


def test_a_failure_is_shown_and_raised(target: Target, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise StorageError("The disk is full.", hint="Free some space.")

    monkeypatch.setattr("workbench.widgets.spec_views.head_training.train_eagle", full)
    training = made(target)
    box = training.live()
    training.start().wait(WAIT)
    assert training.state == "failed" and "The disk is full." in box._words.value
    with pytest.raises(StorageError):
        training.result(WAIT)


@pytest.fixture
def own(fresh: None) -> Iterator[Path]:
    folder = own_cache()
    yield folder
    if folder.exists():
        drop_cache(folder)


def test_a_notebook_has_a_cache_of_its_own_and_shares_what_is_dear(own: Path, tmp_path: Path) -> None:
    real = tmp_path / "cache"
    assert cache_dir() == own != real
    (own / "kernels" / "built.so").touch()
    (own / "heads").mkdir()
    assert (real / "kernels" / "built.so").exists() and not (real / "heads").exists()
    drop_cache(own)
    assert cache_dir() == real and not own.exists() and (real / "kernels" / "built.so").exists()
    assert os.environ["WORKBENCH_CACHE"] == str(real)


def test_where_it_was_stopped_is_marked_and_no_curve_is_no_picture() -> None:
    curve = [{"step": s, "tokens": 100 * s, "loss": 1.0, "right_1": s / 10} for s in (2, 4, 6)]
    (line,) = curve_figure("a head", curve, [3]).layout.shapes
    assert line.x0 == 400
    assert drawing([]) == "" and "60%" in drawing(curve)
    assert not curve_figure("nothing", []).data


def test_a_head_that_goes_on_from_another_has_one_curve() -> None:
    def facts(tokens: int, **more: Any) -> dict[str, Any]:
        points = [{"step": s, "tokens": tokens * s // 4, "right_1": 0.1} for s in (2, 4)]
        return {"curve": points, "trained": {"predictions": tokens}, **more}

    head = facts(40, before=facts(20, before=facts(100)))
    assert [f["trained"]["predictions"] for f in lineage(head)] == [100, 20, 40]
    curve, joints = recorded_curve(head)
    assert [p["tokens"] for p in curve] == [50, 100, 110, 120, 140, 160]
    assert [p["step"] for p in curve] == [2, 4, 6, 8, 10, 12] and joints == [4, 8]
    assert recorded_curve(facts(8)) == (facts(8)["curve"], [])
