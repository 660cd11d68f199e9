"""Another model, device or number format in the same panel; prompts; quality on demand."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from workbench.core.build_weights import build_weights
from workbench.core.quality import submit_quality
from workbench.core.session import Session
from workbench.spec.errors import (
    Cancelled,
    CapacityError,
    ModelNotFound,
    OptionError,
    RecipeError,
    RecordError,
)
from workbench.spec.recipe import Recipe
from workbench.widgets import Panel, PanelState
from workbench.widgets.measuring import settings_for
from workbench.widgets.prompts import examples


@pytest.fixture
def opened(panel: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Fake sessions instead of real ones, in the order they were opened; each takes what it is asked for."""
    made: list[Any] = []

    def make(name: str, recipe: Recipe, *, dtype: str, device: str, **options: Any) -> Any:
        new = type(session)(recipe, dtype=dtype)
        new.options = options
        made.append(new)
        return new

    monkeypatch.setattr("workbench.widgets.actions.Session", make)
    yield made
    for new in made:
        new.close()


def test_another_number_format_keeps_recipe_prompt_and_runs(panel: Any, session: Any, opened: Any) -> None:
    panel.set("ngram", k=3)
    panel.prompt = "why not"
    panel.run().wait(10)
    panel.open(dtype="float32").result(10)
    assert panel.session is opened[0]
    assert not session._closed  # it was given to the panel, who gave it may go on with it
    assert panel.state["dtype"] == "float32"
    assert (panel.recipe, panel.prompt, len(panel.runs)) == (Recipe.of("ngram:k=3"), "why not", 1)
    assert panel.flush()
    assert panel._gui.live.status["stale"] == "model changed"
    assert panel._gui.head.where["dtype"]["value"] == "float32"
    assert panel.run().result(10).dtype == "float32"
    assert panel.flush()
    assert panel._gui.live.status["stale"] == ""
    panel.open(dtype="float64").result(10)
    assert opened[0]._closed  # this one was the panel's own


def test_a_run_in_flight_starts_again_on_the_new_session(
    panel: Any, session: Any, opened: Any, until: Any
) -> None:
    session.step_seconds = 0.02
    handle = panel.run(max_tokens=400)
    assert until(lambda: bool(handle.text))
    panel.open(dtype="float32").result(10)
    assert handle.result(10).dtype == "float32"
    assert (handle.restarts, handle.state) == (1, "done")


def test_a_recipe_switched_while_opening_is_in_place_afterwards(
    panel: Any, opened: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    from workbench.widgets import actions as module

    gate, fake = threading.Event(), module.Session
    monkeypatch.setattr(module, "Session", lambda *a, **k: gate.wait(5) and fake(*a, **k))
    opening = panel.open(dtype="float32")
    assert panel.busy
    assert until(lambda: panel.flush() and panel._gui.live.status["message"].startswith("opening"))
    handle = panel.run()
    gate.set()
    panel.set("paged")
    assert handle.result(10).recipe == Recipe.of("paged").to_json()
    assert opening.state == "done"
    assert until(lambda: opened[0].recipe == panel.recipe == Recipe.of("paged"))


def test_what_cannot_be_opened_leaves_everything_as_it_was(panel: Any, session: Any) -> None:
    with pytest.raises(ModelNotFound, match="no model 'nope'"):
        panel.open("nope")
    opening = panel.open(device="cuda:7")
    with pytest.raises(OptionError, match="cuda"):
        opening.result(30)
    assert panel.session is session
    assert panel.problem.where.startswith("opening")
    assert panel.flush()
    assert panel._gui.head.where["device"]["value"] == "cpu"
    assert panel.run().result(10).text


def test_a_newer_opening_ends_the_one_before_and_stop_ends_any(panel: Any, session: Any, opened: Any) -> None:
    panel.open(dtype="float32")
    second = panel.open(dtype="float64")
    second.result(10)
    assert panel.state["dtype"] == "float64"
    assert all(s._closed for s in opened if s is not panel.session)
    opening = panel.open(dtype="float32")
    opening.cancel()
    try:
        opening.result(10)
    except Cancelled:
        assert panel.state["dtype"] == "float64"
    assert panel.problem is None


def test_menus_say_how_to_get_a_model_and_come_from_a_click(
    panel: Any, opened: Any, until: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    panel.look()
    assert panel.flush()
    entries = dict(panel._gui.head.where["model"]["entries"])
    assert entries["tiny"] == ""
    assert entries["gemma3-270m"] in ("", "workbench fetch gemma3-270m")
    assert [e[0] for e in panel._gui.head.where["dtype"]["entries"]] == ["bfloat16", "float32", "float64"]
    panel._gui.head._handle_custom_msg({"do": "open", "dtype": "float32"}, None)
    assert until(lambda: panel.state["dtype"] == "float32")


def test_prompts_are_a_menu_and_say_whether_they_are_chat(panel: Any) -> None:
    known = examples()
    assert {e.group for e in known.values()} == {"chat", "copy heavy", "text to continue"}
    assert 6 <= len(known) <= 16
    raw = next(e for e in known.values() if not e.chat)
    panel._gui.live._handle_custom_msg({"do": "example", "name": raw.name}, None)
    assert (panel.prompt, panel.chat) == (raw.text, False)
    assert panel.flush()
    assert panel._gui.live.inputs["example"] == raw.name
    panel.prompt = raw.text + "!"
    assert panel.flush()
    assert panel._gui.live.inputs["example"] == ""
    with pytest.raises(OptionError, match="no prompt"):
        panel.use_prompt("x")


def test_a_run_is_restored_with_the_prompt_as_it_was_typed(panel: Any) -> None:
    panel.set("ngram")
    panel.prompt, panel.chat, panel.sampling = "as typed", True, {"max_tokens": 5}
    run = panel.run().result(10)
    panel.set("ngram", False)
    panel.run("another", max_tokens=9).wait(10)
    panel.restore(run)
    assert (panel.prompt, panel.chat, panel.sampling) == ("as typed", True, {"max_tokens": 5})
    assert panel.recipe == Recipe.of("ngram")
    with pytest.raises(RecordError):
        panel.restore(type(run)(**{**run.__dict__, "id": "other"}))


def test_a_state_names_where_it_runs_and_opens_there() -> None:
    state = PanelState("tiny", Recipe.of("paged"), "typed", {"seed": 3}, True, "float32", "cpu", "pinned")
    with Panel.from_state(json.dumps(state.to_json())) as panel:
        assert panel.state == state.to_json()
        plan = panel.session.plan
        assert (plan.dtype, plan.device, plan.numerics) == ("float32", "cpu", "pinned")
        assert "--dtype float32" in panel.as_code("cli")
        assert "--numerics pinned" in panel.as_code("cli")
    for bad in ({"dtype": "int3"}, {"device": 3}, {"numerics": "x"}):
        with pytest.raises(RecipeError):
            PanelState.from_json({"model": "tiny", **bad})


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", dtype="float32") as session:
        yield session


def test_quality_is_measured_shown_and_kept(tiny: Any) -> None:
    panel = Panel(tiny, recipe=Recipe.of("paged", "kivi"), prompt="Why?", sampling={"max_tokens": 4})
    assert panel.widget is not None
    job = panel.measure(context=256, score=16, windows=2)
    run = job.result(60)
    assert run.metric("kl").value > 0
    assert panel.history == (run,)
    assert panel.runs == ()
    panel.flush()
    shown = panel._gui.live.meters["quality"]
    assert shown[0].startswith("KL 0.")
    assert "nats" in shown[0]
    assert "2 windows of held-out" in shown[-1]
    assert "measured" in shown[-1]
    assert panel._gui.live.tables["history"]["rows"][0][-1] == "measured"
    panel.set("kivi", False)
    panel.flush()
    assert panel._gui.live.meters["quality"] == []  # of the recipe on screen, or nothing
    panel.close()


def test_measuring_tells_progress_and_can_be_cancelled(tiny: Any, until: Any) -> None:
    panel = Panel(tiny, recipe=Recipe())
    assert panel.widget is not None
    job = panel.measure(context=256, score=64, windows=40)
    assert until(lambda: panel.flush() and (panel._gui.live.status["measuring"] or {}).get("total") == 40, 60)
    panel.stop()
    assert job.wait(30)
    assert job.state == "cancelled"
    assert panel.history == ()
    assert panel.problem is None
    panel.flush()
    assert panel._gui.live.status["measuring"] is None
    panel.close()


# -- memory -------------------------------------------------------------------------------------------------


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What to call, in turn, at the moment a weight set is about to be built; after the last one, nothing."""
    calls: list[Callable[[], Any]] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        if calls:
            calls.pop(0)()
        return build_weights(*args, **kwargs)

    monkeypatch.setattr("workbench.core.state.build_weights", build)
    return calls


def test_the_session_before_gives_its_memory_back_before_the_next_one_loads(builds: Any) -> None:
    with Panel("tiny", prompt="Once", chat=False, sampling={"max_tokens": 4}) as panel:
        before = panel.session
        panel.run().result(60)
        engine = weakref.ref(before._state.engine)
        assert before.memory()["weights"] > 0
        held: list[Any] = []
        builds.append(lambda: held.append((before.memory(), engine())))
        panel.open(dtype="float32").result(60)
        assert held == [({}, None)]
        assert panel.session is not before
        assert panel.run().result(60).dtype == "float32"


@pytest.mark.parametrize("how", ["fails", "is stopped"])
def test_an_opening_that_comes_to_nothing_leaves_a_session_that_goes_on(builds: Any, how: str) -> None:
    with Panel("tiny", prompt="Once", chat=False, sampling={"max_tokens": 6}) as panel:
        before = panel.session
        said = panel.run().result(60).text
        opening: list[Any] = []

        def trouble() -> None:
            if how == "fails":
                raise CapacityError("no room", hint="close something")
            panel.stop()

        builds.append(trouble)
        opening.append(panel.open(dtype="float32"))
        with pytest.raises(CapacityError if how == "fails" else Cancelled):
            opening[0].result(60)
        assert panel.session is before
        panel.set("paged")  # noted, and put in place by the next run
        run = panel.run().result(60)
        assert (run.text, run.dtype, run.recipe) == (said, "bfloat16", [{"id": "paged"}])
        assert before.memory()["weights"] > 0


def test_a_session_that_was_given_to_the_panel_keeps_its_memory(
    panel: Any, session: Any, opened: Any
) -> None:
    panel.open(dtype="float32").result(10)
    assert session.rested == 0
    panel.open(dtype="float64").result(10)
    assert opened[0].rested == 1


def test_a_session_at_rest_wakes_for_requests_and_for_tasks() -> None:
    with Session("tiny", dtype="float32") as session:
        first = session.generate("Once", max_tokens=6)
        for _ in range(2):
            session.rest().result(30)
            assert session.memory() == {}
        assert session.generate("Once", max_tokens=6).token_ids == first.token_ids
        session.rest().result(30)
        job = submit_quality(session, Recipe(), settings=settings_for(512, context=64, score=8, windows=1))
        assert job.result(60).metric("perplexity").value > 1
        assert session.wait_idle(10)


def test_nothing_is_loaded_before_the_first_recipe_where_that_is_asked_for() -> None:
    with Session("tiny", load=False) as session:
        assert session.wait_idle(5)
        assert session.memory() == {}
        session.apply(session.recipe).result(30)
        assert session.memory()["weights"] > 0
