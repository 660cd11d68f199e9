"""Views, tables, words and code: pure functions of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from workbench.spec.errors import OptionError, RecordError
from workbench.spec.recipe import Recipe
from workbench.widgets import Table, figures, views, words
from workbench.widgets.ab import AB
from workbench.widgets.code import as_code
from workbench.widgets.figures import MIME
from workbench.widgets.palette import INKS
from workbench.widgets.state import PanelState


@pytest.fixture
def pair(panel: Any) -> tuple[Any, Any]:
    """A plain run and one with drafts."""
    plain = panel.run(max_tokens=12).result(10)
    panel.set("ngram")
    return plain, panel.run().result(10)


@pytest.mark.parametrize("view", sorted(set(views.VIEWS) - {"pages"}))
@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_every_view_is_a_figure_and_a_table(pair: Any, view: str, theme: Any) -> None:
    figure = views.to_figure(view, *pair, theme=theme)
    data = json.loads(figure.to_json())
    assert data["data"]
    assert len(figure.to_json()) < 100_000
    table = views.to_table(view, *pair)
    assert len(table) > 0
    assert table.to_text()
    assert table.to_html().startswith("<table>")


def test_a_figure_in_plain_text_is_its_title_not_its_numbers(pair: Any) -> None:
    shown = views.to_figure("memory", pair[0])._repr_mimebundle_()
    assert shown["text/plain"].startswith("Figure: Memory in use") and len(shown["text/plain"]) < 100


def test_a_legend_is_clear_of_the_mode_bar_which_sends_nothing_anywhere(pair: Any) -> None:
    figure = views.to_figure("memory", pair[0])
    assert figure.layout.margin.t >= 72 and figure.layout.legend.yanchor == "bottom"
    assert "sendChartToCloud" in figure.layout.modebar.remove
    shown = figure._repr_mimebundle_()[MIME]
    assert shown["config"]["displaylogo"] is False and set(shown) >= {"data", "layout"}


def test_every_axis_of_every_subplot_looks_alike() -> None:
    figure = figures.new("two", theme="dark")
    figure.set_subplots(rows=1, cols=2)
    for axis in (figure.layout.template.layout.xaxis, figure.layout.template.layout.yaxis):
        assert axis.showline and axis.ticks == "outside" and axis.gridcolor == INKS["dark"]["grid"]
    assert figure.layout.template.data.bar[0].marker.pattern.fillmode == "overlay"
    assert figure.layout.xaxis2.anchor == "y2" and figure.layout.xaxis.gridcolor is None


def test_measured_is_a_solid_line(pair: Any) -> None:
    assert {t.line.dash for t in views.to_figure("latency", *pair).data} == {"solid"}


def test_the_memory_figure_adds_up_to_the_steps(pair: Any) -> None:
    run = pair[0]
    figure = views.to_figure("memory", run)
    drawn = [sum(column) for column in zip(*(t.y for t in figure.data), strict=True)]
    held = [(s["bytes"]["kv_payload"] + s["bytes"]["fragmentation"]) / 2**20 for s in run.steps]
    assert drawn == pytest.approx(held)


def test_acceptance_bars_are_the_survival(pair: Any) -> None:
    figure = views.to_figure("acceptance", pair[1])
    assert list(figure.data[0].y) == pytest.approx(list(pair[1].acceptance["survival"]))
    assert "Nothing was drafted" in views.to_figure("acceptance", pair[0]).layout.title.text


def test_unknown_views_and_missing_runs_say_the_way_out() -> None:
    with pytest.raises(OptionError, match="Views: memory"):
        views.to_figure("nothing")
    with pytest.raises(RecordError, match=r"panel\.run"):
        views.to_table("memory")


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.5 KiB"), (31 * 2**20, "31 MiB"), (1500 * 2**20, "1.46 GiB")],
)
def test_sizes(n: int, text: str) -> None:
    assert words.size(n) == text


def speed(run: Any, value: float) -> Any:
    return replace(
        run, metrics=tuple(replace(m, value=value) if m.name == "decode_speed" else m for m in run.metrics)
    )


@pytest.mark.parametrize(("b", "text"), [(210.0, "2.1× faster"), (50.0, "2× slower"), (101.0, "same speed")])
def test_a_difference_in_words(pair: Any, b: float, text: str) -> None:
    before, after = speed(pair[0], 100.0), speed(pair[1], b)
    after = replace(after, memory={"kv_payload": words.kv_in_use(before.memory) * 69 // 100})
    said = words.delta(before, after, "A")
    assert said.startswith(f"{text}, 31% less KV memory than A")
    assert said.endswith("same 12 tokens")


def sampled(run: Any, temperature: float) -> Any:
    return replace(run, outputs=({**run.outputs[0], "sampling": {"temperature": temperature}},))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: sampled(r, 0.8), "temperature 0.8 instead of 0"),
        (lambda r: replace(r, prompts=("something else",)), "another prompt"),
        (lambda r: replace(r, model="other"), "model other instead of tiny"),
    ],
)
def test_runs_of_different_work_say_what_differs_instead_of_who_is_faster(
    pair: Any, change: Any, says: str
) -> None:
    before, after = (sampled(r, 0.0) for r in (speed(pair[0], 100.0), speed(pair[1], 300.0)))
    assert "faster" in words.delta(before, after, "A")
    said = words.delta(before, change(after), "A")
    assert said == f"not compared with A: {says}"
    assert views.to_table("compare", before, change(after)).note == said.replace(" with A", "")


def test_texts_that_part_say_where() -> None:
    assert words.text_agreement([1, 2, 3], [1, 2, 4]) == "text parts at token 3 of 3"
    assert words.text_agreement([1, 2], [1, 2, 4]) == "same text for 2 tokens"


def test_ab_takes_ratios_of_neighbours(pair: Any) -> None:
    a = tuple(speed(pair[0], v) for v in (10.0, 20.0, 40.0))
    b = tuple(speed(pair[1], v) for v in (20.0, 30.0, 120.0))
    ratio = AB(a, b).ratio("decode_speed")
    assert (ratio.value, ratio.spread, ratio.n) == (2.0, (1.5, 3.0), 3)
    text = str(AB(a, b).table())
    assert "2.00× (1.50–3.00)" in text
    assert json.loads(AB(a, b).figure().to_json())["data"][1]["x"] is not None
    with pytest.raises(RecordError):
        AB(a, b[:2])


def test_tables_escape_and_align() -> None:
    table = Table.of(("name", "n"), [("<b>x</b>", 1500), ("y", None)], note="a & b")
    assert "&lt;b&gt;" in table.to_html()
    assert "<b>" not in table.to_html()
    assert "1,500" in table.to_text()
    assert "a &amp; b" in table.to_html()
    assert table.to_dicts()[1] == {"name": "y", "n": None}


def test_code_forms() -> None:
    state = PanelState("tiny", Recipe.of("paged", "kivi:bits=2"), "it's; rm -rf", {"temperature": 0.5})
    cli = as_code(state, "cli")
    assert "--use kivi:bits=2" in cli
    assert "'it'\"'\"'s; rm -rf'" in cli  # quoted for a shell
    assert "--ignore-eos" not in cli
    assert "--ignore-eos" in as_code(replace(state, sampling={"ignore_eos": True}), "cli")
    assert PanelState.from_json(as_code(state, "json")) == state
    with pytest.raises(OptionError):
        as_code(state, "yaml")  # type: ignore[arg-type]


def test_a_renderer_that_somebody_chose_is_used(pair: Any) -> None:
    import plotly.io as pio

    figure = views.to_figure("steps", *pair)
    before = pio.renderers.default
    try:
        pio.renderers.default = "notebook_connected"
        assert "text/html" in figure._repr_mimebundle_()
        pio.renderers.default = "plotly_mimetype+notebook"
        assert set(figure._repr_mimebundle_()) == {"application/vnd.plotly.v1+json", "text/plain"}
    finally:
        pio.renderers.default = before


def test_words_of_a_table_stand_left_and_quantities_right() -> None:
    shown = Table.of(("what", "size", "n"), [("paged", "3.2 MiB", 4), ("kivi", "−1 KiB", None)]).to_html()
    assert '<td style="text-align:left">paged</td>' in shown
    assert shown.count("text-align:right;font-variant-numeric:tabular-nums") == 4
    assert '<th scope="col" style="text-align:right">size</th>' in shown
