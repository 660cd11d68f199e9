"""Rows NBW: what goes wrong in widgets elsewhere, and must not here."""

from __future__ import annotations

import gc
import importlib
import json
import math
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from time import sleep
from typing import Any

import pytest


@pytest.fixture
def lenient(panel: Any) -> Any:
    """The panel outside tests and CI: problems are shown, not raised."""
    panel.strict = False
    return panel


# -- NBW-01 -------------------------------------------------------------------------------------------------


def boom(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("x")


@pytest.mark.parametrize("way", ["control", "message"])
def test_nbw_01_an_error_in_a_handler_is_shown(
    lenient: Any, session: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = lenient
    if way == "control":
        monkeypatch.setattr(session, "apply", boom)
        panel._gui.controls.rows["paged"].on.value = True
    else:
        monkeypatch.setattr(session, "submit", boom)
        panel._gui.live._handle_custom_msg({"do": "run"}, [])
    assert panel.flush()
    problem = panel._gui.live.status["problem"]
    assert (problem["kind"], problem["message"]) == ("ValueError", "x")
    assert problem["where"]
    assert "Traceback" in problem["details"]
    assert not panel.busy
    assert panel._gui.live.status["state"] == "idle"
    row = panel._gui.controls.rows["paged"]
    assert (row.on.disabled, row.on.value) == (False, False)
    monkeypatch.undo()
    assert panel.run().result(10).state == "done"
    assert panel.problem is None


def test_nbw_01_in_tests_and_ci_it_is_raised(
    panel: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "submit", boom)
    assert panel.strict
    with pytest.raises(ValueError, match="x"):
        panel._gui.live._handle_custom_msg({"do": "run"}, [])
    assert panel.problem.message == "x"


def test_nbw_01_a_failed_run_and_a_failed_switch_are_shown(lenient: Any, session: Any, until: Any) -> None:
    panel = lenient
    panel.prompt = ""
    handle = panel.run()
    assert handle.wait(10)
    assert handle.state == "failed"
    assert panel.problem.hint == "Write one."
    session.fail_apply = RuntimeError("no memory")
    panel.set("paged")
    assert until(lambda: panel.problem is not None and "no memory" in panel.problem.message)
    assert "paged" not in panel.recipe
    assert not panel.busy
    panel._gui.live._handle_custom_msg({"do": "dismiss"}, [])
    assert panel.flush()
    assert panel._gui.live.status["problem"] is None


def test_nbw_01_a_field_without_a_number_says_so_and_changes_nothing(lenient: Any) -> None:
    lenient._gui.live._handle_custom_msg({"do": "sampling", "name": "temperature", "value": None}, [])
    assert lenient.problem.message == "temperature needs a number."
    assert lenient.sampling == {"max_tokens": 8}
    lenient._gui.live._handle_custom_msg({"do": "sampling", "name": "temperature", "value": -1}, [])
    assert lenient.problem.kind == "SamplingError"
    lenient._gui.live._handle_custom_msg({"do": "sampling", "name": "temperature", "value": 0.5}, [])
    assert lenient.sampling == {"max_tokens": 8, "temperature": 0.5}


# -- NBW-02, NBW-03 -----------------------------------------------------------------------------------------


def test_nbw_02_two_controls_of_one_number_do_not_bounce() -> None:
    from workbench.widgets.options import Pair

    heard: list[float] = []
    pair = Pair(0.5, 0.0, 1.0, 2, heard.append)
    pair.slider.value = 0.123
    assert (pair.slider.value, pair.field.value) == (0.12, 0.12)
    assert heard == [0.12]
    pair.field.value = 0.124
    assert (pair.slider.value, pair.field.value) == (0.12, 0.12)
    assert len(heard) <= 2


def test_nbw_03_a_dragged_slider_runs_a_few_times_and_ends_at_its_last_value(
    panel: Any, session: Any, until: Any
) -> None:
    session.apply_seconds, session.step_seconds = 0.1, 0.002
    panel.sampling = {"max_tokens": 4}
    panel.set("ngram")
    handle = panel.run()
    assert handle.wait(10)
    before = len(session.started)
    handle = panel.run()
    slider = panel._gui.controls.rows["ngram"].options["k"].main
    for i in range(50):
        slider.value = 2 + i % 49
        sleep(0.01)
    final = slider.value
    assert handle.wait(5)
    assert until(lambda: not panel.busy, 1.0)
    runs = session.started[before:]
    assert len(runs) <= 8
    assert dict(runs[-1][0].get("ngram").options)["k"] == final
    assert session._requests == []


# -- NBW-04 -------------------------------------------------------------------------------------------------

_HIDDEN = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None  # what a package that is not installed looks like
import workbench.widgets
from workbench.widgets import Panel
panel = Panel("tiny", sampling={{"max_tokens": 4}})
assert panel.widget is None
panel.run().result(60)
bundle = panel._repr_mimebundle_()
assert "pip install -e '.[lab]'" in bundle["text/plain"]
assert "pip install" in bundle["text/html"]
print(sorted(bundle), "<table>" in bundle["text/html"])
if "application/vnd.plotly.v1+json" in bundle:
    print("pip install" in str(bundle["application/vnd.plotly.v1+json"]["layout"]["annotations"]))
panel.close()
"""


@pytest.mark.parametrize(
    ("hidden", "figure"),
    [
        (["anywidget"], True),
        (["ipywidgets"], True),
        (["ipywidgets", "anywidget", "plotly", "plotly.io"], False),
    ],
)
def test_nbw_04_without_the_widget_package_a_static_figure_and_a_notice(
    hidden: list[str], figure: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HIDDEN.format(hidden=hidden)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert ("application/vnd.plotly.v1+json" in lines[0]) is figure
    assert lines[0].endswith("True")
    assert lines[1:] == (["True"] if figure else [])


# -- NBW-05, NBW-09, NBW-13 ---------------------------------------------------------------------------------


def test_nbw_05_an_interrupt_while_waiting_stops_the_run(
    panel: Any, session: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.step_seconds = 0.01
    handle = panel.run(max_tokens=5000)
    assert until(lambda: bool(handle.text))
    real = handle._ended.wait
    calls = iter([KeyboardInterrupt()])

    def interrupted(timeout: float | None = None) -> bool:
        for error in calls:
            raise error
        return real(timeout)

    monkeypatch.setattr(handle._ended, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.ended
    assert handle.run.state == "cancelled"
    assert panel.run(max_tokens=4).result(10).state == "done"
    assert sum(t.name == "fake-session" and t.is_alive() for t in threading.enumerate()) == 1


def test_nbw_09_two_hundred_runs_keep_widgets_outputs_and_memory_bounded(panel: Any) -> None:
    import psutil
    from ipywidgets.widgets.widget import _instances

    process = psutil.Process()
    panel.set("ngram")
    panel.sampling = {"max_tokens": 32}
    counts, resident = {}, {}
    for i in range(1, 201):
        assert panel.run().wait(10)
        if i in (10, 50, 200):
            assert panel.flush()
            gc.collect()
            counts[i], resident[i] = len(_instances), process.memory_info().rss
    assert counts[200] == counts[10]
    assert len(panel.runs) <= 20
    assert resident[200] - resident[50] < 20e6


class Tensor:
    """Stands for something big that an exception's frames would keep alive."""


def test_nbw_13_an_error_that_was_shown_keeps_nothing_alive(lenient: Any, session: Any) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def out_of_memory() -> None:
        big = Tensor()
        alive.append(weakref.ref(big))
        raise MemoryError("200 MB")

    session.fail_step = out_of_memory
    handle = lenient.run()
    assert handle.wait(10)
    assert lenient.flush()
    assert lenient._gui.live.status["problem"]["kind"] == "MemoryError"
    gc.collect()
    assert alive[0]() is None
    assert lenient.run().result(10).state == "done"


def test_nbw_13_an_error_in_a_click_keeps_nothing_alive(
    lenient: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def out_of_memory(*args: Any) -> Any:
        big = Tensor()
        alive.append(weakref.ref(big))
        try:
            raise MemoryError("inner")
        except MemoryError as err:
            raise RuntimeError("outer") from err

    monkeypatch.setattr(lenient.session, "submit", out_of_memory)
    lenient._gui.live._handle_custom_msg({"do": "run"}, [])
    gc.collect()
    assert lenient.problem.kind == "RuntimeError"
    assert alive[0]() is None


# -- NBW-11 -------------------------------------------------------------------------------------------------


@pytest.fixture
def odd_run(panel: Any) -> Iterator[Any]:
    """A run whose steps took .5, NaN, infinite and .7 ms."""
    run = panel.run(max_tokens=4).result(10)
    times = (0.5, math.nan, math.inf, 0.7)
    steps = tuple({**s, "phase_ms": {"forward": t}} for s, t in zip(run.steps, times, strict=True))
    yield replace(run, steps=steps)


def strict_json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_nbw_11_nan_and_infinity_are_gaps_with_a_note(odd_run: Any) -> None:
    from workbench.widgets import to_figure

    for view in ("steps", "latency"):
        figure = to_figure(view, odd_run)
        data = strict_json(figure.to_json())
        ys = list(data["data"][0]["y"])
        assert [ys[0], ys[1], ys[2], ys[3]] == [0.5, None, None, 0.7]
        assert any("2 points left out" in a["text"] for a in data["layout"]["annotations"])


def test_nbw_11_zero_on_a_log_axis_is_left_out_and_said() -> None:
    from workbench.widgets import clean

    values, left_out = clean.series([0.5, math.nan, math.inf, 0.7, 0.0], log=True)
    assert values == [0.5, None, None, 0.7, None]
    assert clean.note(left_out, log=True) == "3 points left out (not finite, or not positive on a log axis)"


def test_nbw_11_the_live_widget_sends_no_nan(panel: Any) -> None:
    panel.run().wait(10)
    live = panel._controller.live
    live.pieces[0][3] = math.nan
    live.steps[0] = replace(live.steps[0], phase_ms={"forward": math.inf})
    assert panel.flush()
    for name in ("status", "text", "meters", "tables", "inputs"):
        strict_json(json.dumps(getattr(panel._gui.live, name)))
    assert panel._gui.live.text["pieces"][0][3] is None


# -- the script ---------------------------------------------------------------------------------------------


def test_the_script_is_one_module_that_fetches_nothing_and_writes_no_markup() -> None:
    live = importlib.import_module("workbench.widgets.live").Live
    script = str(live._esm)
    assert "export default" in script
    assert not any(
        word in script for word in ("import ", "import(", "innerHTML", "outerHTML", "insertAdjacentHTML")
    )
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in str(live._css)


_FIRST = """
import sys
from workbench.widgets import Panel
panel = Panel("tiny", sampling={"max_tokens": 4})
panel.widget
panel.run("Why?").result(60)
print(sorted(panel.to_figure("steps")._repr_mimebundle_()))
panel.close()
heavy = ("nbformat", "jsonschema", "pandas", "scipy", "transformers.models.auto.tokenization_auto")
print([m for m in heavy if m in sys.modules])
"""


def test_the_first_picture_imports_no_more_than_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["['application/vnd.plotly.v1+json', 'text/plain']", "[]"]
