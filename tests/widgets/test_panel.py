"""The panel driven from Python: what a click does, a call does."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from workbench.spec.errors import OptionError, PlanError, RecordError
from workbench.spec.events import DraftRecord
from workbench.spec.recipe import Recipe, Use
from workbench.widgets import snapshot
from workbench.widgets.collect import LiveRun


def test_a_run_gives_text_numbers_and_a_picture(panel: Any) -> None:
    run = panel.run().result(10)
    assert run.text == "".join(p[0] for p in run_pieces(panel))
    status, meters = panel._gui.live.status, panel._gui.live.meters
    assert (status["state"], status["ended"], status["done"]) == ("idle", "done", 8)
    assert meters["memory"]["kv_payload"] == run.memory["kv_payload"]
    assert meters["latency"]["decode_speed"] == run.metric("decode_speed").value
    assert len(meters["strip"]) == len(run.steps)


def test_what_a_run_warned_of_stands_below_its_path(panel: Any) -> None:
    panel.run().result(10)
    live = panel._controller.live
    assert snapshot.meters(panel._controller)["warnings"] == []
    live.steps[0] = replace(live.steps[0], warnings=("the file is damaged",))
    live.steps[1] = replace(live.steps[1], warnings=("the file is damaged", "nobody drafts"))
    assert snapshot.meters(panel._controller)["warnings"] == ["the file is damaged", "nobody drafts"]


def run_pieces(panel: Any) -> list[list[Any]]:
    assert panel.flush()
    return panel._gui.live.text["pieces"]


def test_tokens_carry_their_source_step_and_logprob(panel: Any) -> None:
    panel.set("ngram")
    run = panel.run().result(10)
    pieces = run_pieces(panel)
    assert "".join(p[0] for p in pieces) == run.text
    assert [p[1] for p in pieces] == [t["source"] for t in run.outputs[0]["tokens"]]
    assert {"accepted", "corrected"} <= {p[1] for p in pieces}
    assert panel._gui.live.meters["draft"]["tokens"][0][1] is True
    assert panel._gui.live.meters["draft"]["tokens"][1][1] is False


def test_a_drafted_tree_is_told_by_depth_and_by_what_each_token_follows() -> None:
    record = DraftRecord(
        "r", (5, 6, 7, 8), (-1, -1, 0, 0), accepted=(0, 3), emitted=3, source="medusa", rule="r1"
    )
    live = LiveRun("", "", 0.0, 8, "exact", decode=lambda ids: f"t{ids[0]}", drafts=[record])
    assert live.draft()["tokens"] == [
        ["t5", True, 0, ""], ["t6", False, 0, ""], ["t7", False, 1, "t5"], ["t8", True, 1, "t5"],
    ]  # fmt: skip


def test_a_click_and_a_call_do_the_same(panel: Any) -> None:
    rows = panel._gui.controls.rows
    rows["paged"].on.value = True  # a click
    assert panel.recipe == Recipe.of("paged")
    panel.set("kivi", bits=2) if "bits" in rows["kivi"].options else panel.set("kivi")
    assert panel.flush()
    assert rows["kivi"].on.value
    rows["paged"].on.value = False
    assert "paged" not in panel.recipe


def test_an_option_control_changes_the_recipe_and_follows_it(panel: Any) -> None:
    row = panel._gui.controls.rows["ngram"]
    panel.set("ngram")
    row.options["k"].main.value = 4
    assert panel.recipe.get("ngram") == Use.of("ngram", k=4)
    panel.set("ngram", k=7)
    assert panel.flush()
    assert row.options["k"].main.value == 7


def test_what_cannot_be_switched_on_is_greyed_and_says_the_way_out(panel: Any) -> None:
    panel.set("kivi")
    assert panel.flush()
    row = panel._gui.controls.rows["kv_int8"]
    assert row.on.disabled
    assert "switch off KIVI first" in row.remedy.value
    panel.set("kivi", False)
    assert panel.flush()
    assert not row.on.disabled
    assert row.remedy.value == ""


def test_what_stands_against_a_whole_group_is_said_once(panel: Any) -> None:
    panel.set("paged")
    panel.set("prefix_cache")
    panel.set("kvtc")
    assert panel.flush()
    controls = panel._gui.controls
    for heading, ids in (("KV format", ("kv_int8", "kivi")), ("KV selection", ("snapkv", "h2o"))):
        note = controls._notes[heading]
        assert note.layout.display is None and "switch off KVTC (KV at rest) first" in note.value
        for row in map(controls.rows.get, ids):
            assert row.on.disabled and row.remedy.layout.display == "none" and row.remedy.value == note.value
    controls.search.value = "lookup"
    assert controls._notes["KV format"].layout.display == "none"
    controls.search.value = ""
    panel.set("kvtc", False)
    assert panel.flush()
    assert controls._notes["KV format"].layout.display == "none"
    assert not controls.rows["kivi"].on.disabled


def test_a_recipe_that_does_not_fit_changes_nothing(panel: Any) -> None:
    panel.set("kivi")
    with pytest.raises(PlanError, match="switch off KIVI"):
        panel.set("kv_int8")
    assert panel.recipe == Recipe.of("kivi")
    with pytest.raises(OptionError):
        panel.set("ngram", k=10_000)
    assert panel.recipe == Recipe.of("kivi")


def test_a_preset_is_applied_and_named(panel: Any) -> None:
    menu = panel._gui.controls.preset
    assert menu.value == "plain"
    together = next(o for o in menu.options if o.startswith("together"))
    menu.value = together
    assert panel.recipe == Recipe.of("paged", "kivi", "ngram")
    panel.set("kivi", False)
    panel.set("ngram", k=3)
    assert panel.flush()
    assert menu.value == "own recipe"
    panel.undo()
    panel.undo()
    assert panel.flush()
    assert menu.value == together


def test_undo_and_redo(panel: Any) -> None:
    panel.set("paged")
    panel.set("ngram")
    panel.undo()
    assert panel.recipe == Recipe.of("paged")
    panel.redo()
    assert panel.recipe == Recipe.of("paged", "ngram")
    panel.undo()
    panel.set("kivi")
    assert panel.redo() is None
    assert panel.recipe == Recipe.of("paged", "kivi")


def test_a_change_while_running_restarts_from_the_prompt(panel: Any, session: Any, until: Any) -> None:
    session.step_seconds = 0.02
    panel.sampling = {"max_tokens": 60}
    handle = panel.run()
    assert until(lambda: len(session.started) == 1 and handle.text)
    panel.set("ngram")
    run = handle.result(20)
    assert [r for r, _ in session.started] == [Recipe(), Recipe.of("ngram")]
    assert run.recipe == Recipe.of("ngram").to_json()
    assert handle.restarts == 1
    assert len(run.token_ids) == 60
    assert not panel.stale


def test_figures_of_another_recipe_are_stale_until_new_data(panel: Any) -> None:
    panel.run().wait(10)
    panel.set("paged")
    assert panel.flush()
    assert panel._gui.live.status["stale"] == "recipe changed"
    panel.run().wait(10)
    assert panel.flush()
    assert panel._gui.live.status["stale"] == ""


def test_stop_keeps_what_there_is(panel: Any, session: Any, until: Any) -> None:
    session.step_seconds = 0.02
    panel.sampling = {"max_tokens": 500}
    handle = panel.run()
    assert until(lambda: bool(handle.text))
    panel.stop()
    run = handle.result(5)
    assert (handle.state, run.state) == ("cancelled", "cancelled")
    assert 0 < len(run.token_ids) < 500
    assert panel.flush()
    assert panel._gui.live.status["ended"] == "cancelled"
    assert not panel.busy


def test_a_new_run_ends_the_one_before(panel: Any, session: Any, until: Any) -> None:
    session.step_seconds = 0.02
    first = panel.run(max_tokens=500)
    assert until(lambda: bool(first.text))
    second = panel.run(max_tokens=4)
    assert second.result(10).state == "done"
    assert first.wait(5)
    assert first.state == "cancelled"


def test_the_latest_run_is_compared_with_the_pinned_one_in_words(panel: Any) -> None:
    with pytest.raises(RecordError):
        panel.pin()
    panel.run().wait(10)
    panel.pin()
    panel.set("ngram")
    panel.run().wait(10)
    assert panel.flush()
    meters = panel._gui.live.meters
    assert "than A (plain)" in meters["delta"]
    assert "same 8 tokens" in meters["delta"]
    assert meters["pinned"]["memory"] == dict(panel.pinned.memory)
    assert panel._gui.live.tables["compare"]["rows"]
    assert len(panel._gui.live.tables["history"]["rows"]) == 2


def test_ab_interleaves_and_restores_the_recipe(panel: Any, session: Any) -> None:
    panel.set("paged")
    result = panel.ab(Recipe(), Recipe.of("ngram"), repeats=2)
    order = [str(r) for r, _ in session.started]
    assert order == ["plain", "ngram"] * 3  # one pair warms up
    assert len(result.a) == len(result.b) == 2
    assert result.ratio("kv").value == pytest.approx(1.0)
    assert "interleaved" in str(result.table())
    assert panel.recipe == Recipe.of("paged")


def test_ab_keeps_to_its_budget(panel: Any, session: Any) -> None:
    session.step_seconds = 0.01
    result = panel.ab(Recipe(), Recipe.of("ngram"), repeats=50, budget_s=0.05)
    assert 1 <= len(result.a) < 50
    assert "interleaved pair" in str(result.table())


def test_the_state_is_one_json_value_and_comes_back(panel: Any, session: Any) -> None:
    from workbench.widgets import Panel

    panel.set("ngram", k=3)
    panel.prompt = 'a "quoted" </script> prompt'
    panel.sampling = {"temperature": 0.5, "stop": ("x",)}
    text = json.dumps(panel.state)
    again = Panel.from_state(text, session)
    assert again.state == panel.state
    scope: dict[str, Any] = {}
    code = (
        panel.as_code("python")
        .replace("Panel.from_state(", "state = (")
        .replace("import Panel", "import Panel as _")
    )
    exec(compile(code.rsplit("\n", 1)[0], "cell", "exec"), scope)  # noqa: S102 - the code the panel hands out
    assert scope["state"] == panel.state
    assert "--use ngram:k=3" in panel.as_code("cli")
    again.close()


def test_200_random_toggles_and_cancels_from_four_threads(panel: Any, session: Any, until: Any) -> None:
    session.step_seconds = 0.001
    panel.sampling = {"max_tokens": 50}
    choices = ("paged", "ngram", "chunked_prefill", "kivi")
    failures: list[BaseException] = []

    def person(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(50):
                what = rng.random()
                if what < 0.7:
                    panel.set(rng.choice(choices), rng.random() < 0.5)
                elif what < 0.85:
                    panel.run()
                else:
                    panel.stop()
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=person, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "deadlock"
    assert failures == []
    panel.set("ngram", k=2)
    run = panel.run().result(20)
    assert until(lambda: not panel.busy)
    assert run.recipe == panel.recipe.to_json() == session.recipe.to_json()
    assert session.applied[-1] == panel.recipe
    assert panel.flush()
    assert not panel.stale
    assert panel._gui.live.status["state"] == "idle"
    assert {i for i, r in panel._gui.controls.rows.items() if r.on.value} == {u.id for u in panel.recipe}


def test_a_recipe_applied_by_a_cell_shows_in_the_panel(panel: Any, session: Any, until: Any) -> None:
    session.apply(Recipe.of("paged"))
    assert until(lambda: panel.recipe == Recipe.of("paged"))
    assert panel.flush()
    assert panel._gui.controls.rows["paged"].on.value


def test_saved_runs_go_to_the_store(panel: Any, tmp_path: Any) -> None:
    from workbench.records.store import RunStore

    panel.store = RunStore(tmp_path / "runs.db")
    panel.run().wait(10)
    saved = panel.save()
    assert panel.store.get(saved.id).token_ids == saved.token_ids
