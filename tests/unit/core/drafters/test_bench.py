"""The benchmark as a whole: what it measures, what it keeps, how it goes on. No time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workbench.core import measure
from workbench.core.drafters import known
from workbench.core.drafters.bench import drafter_steps, run_drafters
from workbench.core.drafters.process import from_dict, to_dict
from workbench.core.drafters.settings import Cell, DrafterSettings
from workbench.records.runfile import dumps, loads
from workbench.spec.errors import Cancelled, OptionError, PlanError, UnknownTechnique
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

SIZES = {"prompts": 2, "tokens": 6, "longest": 64}


@pytest.fixture
def asked(model_folder: Any, tmp_path: Path) -> DrafterSettings:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} and {i} and {i} and"}) + "\n" for i in range(12)))
    return DrafterSettings(
        str(model_folder("llama")), (Recipe.of("ngram:k=2"), Recipe.of("suffix")), (str(path),), (1, 2),
        ("unquantized",), ("fast",), SIZES, dtype="float32",
    )  # fmt: skip


def count(settings: DrafterSettings, folder: Path, stop_after: int = 1 << 30) -> tuple[int, Run | None]:
    """Turns of contestants that were taken, and the run unless it was stopped."""
    steps = drafter_steps(settings, lambda *_: None, folder)
    for n in range(stop_after):
        try:
            next(steps)
        except StopIteration as end:
            return n, end.value
    steps.close()
    return stop_after, None


def test_a_run_has_every_number_of_every_drafter_and_cell(asked: DrafterSettings, tmp_path: Path) -> None:
    told: list[tuple[float, float, str]] = []
    run = run_drafters(asked, lambda *t: told.append(t), tmp_path)
    bench = run.plan["bench"]
    assert run.contestants == ("plain", "ngram:k=2", "suffix") and loads(dumps(run)) == run
    assert list(bench["cells"]) == ["asked_b1", "asked_b2"]
    assert {(r["cell"], r["drafter"]) for r in bench["rows"]} == {
        (c, d) for c in bench["cells"] for d in run.contestants[1:]
    }
    for row in bench["rows"]:
        assert row["same"] == row["prompts"] > 0 and row["turns"] == 2
        assert 0 < row["low"] <= row["middle"] <= row["high"] and row["plain_ms"] > 0
        assert row["low"] <= row["speedup"] <= row["high"]
        assert row["predicted"] > 0 and row["error"] >= 0 and row["own_error"] >= 0
    tags = {m.name: m.tag for m in run.metrics}
    assert tags["asked_b1:ngram:k=2/plain"] == "measured" == tags["asked_b2:plain"]
    assert tags["asked_b1:ngram:k=2:predicted"] == "predicted" == tags["asked_b2:suffix:from_batch_1"]
    assert [c["batches"] for c in bench["crossings"]] == [[1, 2], [1, 2]]
    assert told and all(0 <= done <= total for done, total, _ in told)
    assert run.notes == ()


def test_stopped_it_goes_on_where_it_was_and_measures_nothing_twice(
    asked: DrafterSettings, tmp_path: Path
) -> None:
    assert count(asked, tmp_path, stop_after=5) == (5, None)  # one whole turn of three, and two of the next
    again, run = count(asked, tmp_path)
    assert again == 9 and run is not None and run.notes == ()
    assert count(asked, tmp_path)[0] == 0
    assert count(replace(asked, fresh=True), tmp_path)[0] == 12
    assert count(replace(asked, drafters=asked.drafters[:1]), tmp_path)[0] == 8  # of other contestants


def test_a_deadline_begins_no_turn_and_says_what_is_missing(asked: DrafterSettings, tmp_path: Path) -> None:
    alone = replace(asked, batches=(1,))
    count(alone, tmp_path, stop_after=3)
    turns, run = count(replace(alone, deadline_s=1e-9), tmp_path)
    assert turns == 0 and run is not None
    (line,) = run.notes
    assert line.startswith("1 of 2 turns are not measured, the deadline of 1e-09 s came first")
    rows = run.plan["bench"]["rows"]
    assert [r["turns"] for r in rows] == [1, 1] and all(r["predicted"] is None for r in rows)
    assert not run.plan["bench"]["crossings"]


def test_numbers_of_other_code_are_named(
    asked: DrafterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = replace(asked, batches=(1,))
    count(alone, tmp_path)
    monkeypatch.setattr("workbench.core.drafters.bench.code_digest", lambda: "another")
    _, run = count(alone, tmp_path)
    assert run is not None and run.notes == (
        "2 of 2 turns were measured with other code: --fresh repeats them",
    )
    assert len(known.code_digest()) == 16


def test_a_listener_may_cancel_it(asked: DrafterSettings, tmp_path: Path) -> None:
    def tell(done: float, total: float, what: str) -> None:
        if "turn 2 of 2" in what:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        run_drafters(asked, tell, tmp_path)
    assert count(asked, tmp_path)[0] == 9


def test_weights_and_numerics_are_measured_at_the_first_batch_size() -> None:
    settings = DrafterSettings(
        "tiny", prompts=("mixed", "chat"), batches=(1, 8), weights=("unquantized", "rtn:bits=4")
    )
    assert [c.label for c in settings.chosen()] == [
        "mixed_b1", "chat_b1", "mixed_b8", "chat_b8", "mixed_b1_rtn:bits=4", "chat_b1_rtn:bits=4",
        "mixed_b1_pinned", "chat_b1_pinned",
    ]  # fmt: skip
    assert [c.label for c in replace(settings, cells=("chat_b8",)).chosen()] == ["chat_b8"]
    with pytest.raises(OptionError, match="Two sets of prompts are called 'chat'"):
        replace(settings, prompts=("chat", "elsewhere/chat.jsonl")).chosen()
    assert from_dict(json.loads(json.dumps(to_dict(settings)))) == settings


@pytest.mark.parametrize(("batch", "turns"), [(1, 24), (2, 6), (8, 2), (16, 2)])
def test_there_are_turns_for_two_halves(batch: int, turns: int) -> None:
    assert Cell("mixed", batch, "unquantized", "fast").turns(24) == turns


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"batches": (0,)}, OptionError),
        ({"batches": ()}, OptionError),
        ({"weights": ("ngram",)}, OptionError),
        ({"weights": ("nope",)}, UnknownTechnique),
        ({"cells": ("nope_b1",)}, OptionError),
        ({"sizes": {"tokens": 0}}, OptionError),
        ({"sizes": {"rounds": 3}}, OptionError),
        ({"deadline_s": -1.0}, OptionError),
        ({"drafters": (Recipe.of("kv_int8"),)}, OptionError),
        ({"drafters": (Recipe.of("mtp"),)}, PlanError),
    ],
)
def test_wrong_settings_are_named(
    asked: DrafterSettings, tmp_path: Path, wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run_drafters(replace(asked, **wrong), folder=tmp_path)


def test_all_drafters_that_run_here_compete_when_none_is_named(
    asked: DrafterSettings, tmp_path: Path
) -> None:
    every = replace(asked, drafters=(), batches=(1,))
    _, run = count(replace(every, deadline_s=1e-9), tmp_path)
    assert run is not None
    assert {"plain", "ngram", "suffix", "draft_model"} <= set(run.contestants)
    assert not {"mtp", "eagle3"} & set(run.contestants)  # a random model has no heads


def test_the_same_from_a_script(
    asked: DrafterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    told: list[float] = []
    more = {"prompts": asked.prompts, "batches": (1,), "weights": asked.weights, "numerics": asked.numerics}
    run = measure.drafters(
        asked.model, "ngram:k=2", sizes=SIZES, dtype="float32", tell=lambda f, _: told.append(f), **more
    )
    assert run.contestants == ("plain", "ngram:k=2") and told and max(told) <= 1
    assert (tmp_path / "cache" / "points" / "drafters.jsonl").is_file()
