"""Comparisons: direction and words, the margin rule, and conditions that make a comparison unfair."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import workbench
from workbench.records.compare import compare, to_text
from workbench.records.deltas import delta
from workbench.spec.run import Metric, Run

Make = Callable[..., Run]


def m(value: float, unit: str = "ms", better: str = "lower", **more: Any) -> Metric:
    return Metric("x", value, unit, better=better, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "direction", "words"),
    [
        (m(20), m(10), "better", "2× faster"),
        (m(10), m(20), "worse", "2× slower"),
        (m(100, "tok/s", "higher"), m(210, "tok/s", "higher"), "better", "2.1× faster"),
        (m(100, "B"), m(69, "B"), "better", "31.0% less"),
        (m(100, "B"), m(300, "B"), "worse", "3× as much"),
        (m(5), m(5), "same", "the same"),
        (m(0.01, "nats"), m(0.026, "nats"), "worse", "+0.016 nats"),
        (m(10, "%", "higher"), m(12, "%", "higher"), "better", "+2 points"),
        (m(1, "ms", ""), m(2, "ms", ""), "changed", "2× slower"),
        (m(float("nan")), m(1), "changed", "not comparable"),
        (m(0, "B"), m(5, "B"), "worse", "+5 B"),
    ],
)
def test_direction_and_words(a: Metric, b: Metric, direction: str, words: str) -> None:
    found = delta(a, b)
    assert (found.direction, found.words) == (direction, words)


def test_overlapping_ranges_are_said_to_overlap() -> None:
    a, b = m(10, n=3, spread=(8, 12)), m(11, n=3, spread=(9, 13))
    assert delta(a, b).overlap and "overlap" in delta(a, b).words
    apart = m(20, n=3, spread=(18, 22))
    assert not delta(a, apart).overlap and "overlap" not in delta(a, apart).words
    assert not delta(a, replace(b, n=1)).overlap


def test_a_predicted_number_is_not_set_against_a_measured_one() -> None:
    assert "not comparable" in delta(m(1), m(1, tag="predicted")).words
    assert "not comparable" in delta(m(1), m(1, unit="s")).words


def test_every_shared_number_and_nothing_else_is_compared(make_run: Make) -> None:
    a = make_run()
    b = make_run(metrics=(*a.metrics[:2], Metric("new", 1, "")), memory={"weights": 5, "other": 1})
    assert [d.name for d in compare(a, b).deltas] == [
        "decode_speed", "ttft", "memory_weights", "acceptance_tau", "acceptance_rate",
    ]  # fmt: skip
    assert compare(a, b).to_rows()[0]["name"] == "decode_speed"


def test_the_headline_says_what_people_ask_first(make_run: Make) -> None:
    a = make_run()
    faster = Metric("decode_speed", 210.0, "tok/s", better="higher")
    kl = Metric("kl", 0.016, "nats", better="lower")
    b = make_run("b" * 32, metrics=(faster, kl), memory={**a.memory, "kv_payload": 2648})
    assert compare(a, b).headline == "2.1× faster, 31.0% less KV memory, KL 0.016 nats, τ 2.5 tok/draft"
    assert compare(a, a).headline.startswith("KL 0 nats")


def test_the_recipe_difference_is_named(make_run: Make) -> None:
    a = make_run()
    b = make_run(recipe=[{"id": "kivi", "bits": 4}, {"id": "ngram"}])
    diff = compare(a, b).recipe
    assert (diff.added, diff.removed, diff.changed) == (("ngram",), ("paged",), ("kivi",))
    assert "+ngram −paged ~kivi" in compare(a, b).to_text()


def change(run: Run, at: int, token: int, margin: float | None = None, noise: float = 0.0) -> Run:
    """The run with another token at an index, another top-two margin there, and noisier scores before it."""
    outputs = copy.deepcopy(list(run.outputs))
    outputs[0]["token_ids"][at] = outputs[0]["tokens"][at]["id"] = token
    for t in outputs[0]["tokens"][:at]:
        t["logprob"] += noise
    if margin is not None:
        outputs[0]["tokens"][at]["top_logprobs"] = [[token, -1.0], [99, -1.0 - margin]]
    return replace(run, outputs=tuple(outputs))


def test_the_first_token_that_differs_is_found(make_run: Make) -> None:
    a = make_run(tokens=[1, 2, 3, 4])
    assert compare(a, a).divergences[0].at is None
    found = compare(a, change(a, 2, 9)).divergences[0]
    assert (found.at, found.a, found.b, found.shared) == (2, 3, 9, 2)
    longer = compare(a, make_run(tokens=[1, 2, 3, 4, 5])).divergences[0]
    assert longer.at is None and "second run is longer" in longer.words


@pytest.mark.parametrize(("margin", "allowed"), [(0.05, True), (0.2, False)])
def test_the_margin_rule_of_the_fast_class(make_run: Make, margin: float, allowed: bool) -> None:
    a = change(make_run(), 2, 3, margin=margin)
    b = change(make_run(), 2, 9, noise=0.04)  # twice the noise is 0.08
    found = compare(a, b).divergences[0]
    assert found.margin == pytest.approx(margin) and found.noise == pytest.approx(0.04)
    assert found.allowed is allowed


def test_pinned_exact_runs_that_part_are_a_defect(make_run: Make) -> None:
    a = make_run(numerics="pinned")
    found = compare(a, change(a, 1, 9)).divergences[0]
    assert found.allowed is False and "defect" in found.words


def test_a_lossy_recipe_may_part(make_run: Make) -> None:
    a = make_run(numerics="pinned")
    found = compare(a, replace(change(a, 1, 9), plan={"kind": "lossy"})).divergences[0]
    assert found.allowed is None


def test_without_logprobs_nothing_is_judged(make_run: Make) -> None:
    a = make_run()
    b = change(a, 1, 9)
    for run in (a, b):
        for t in run.outputs[0]["tokens"]:
            t["logprob"], t["top_logprobs"] = None, []
    found = compare(a, b).divergences[0]
    assert found.at == 1 and found.allowed is None and "logprobs=2" in found.words


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"numerics": "pinned"}, "numerics"),
        ({"model": "other"}, "model"),
        ({"weight_hash": "x"}, "weights"),
        ({"prompt": "Twice"}, "The prompt"),
        ({"state": "cancelled"}, "cancelled"),
        ({"kind": "bench"}, "kind"),
        ({"plan": {"kind": "exact", "limits": {"kv_pool_tokens": 1}}}, "kv_pool_tokens"),
        ({"tokens": [1, 2]}, "length"),
    ],
)
def test_an_unfair_comparison_says_so(make_run: Make, changes: dict[str, Any], says: str) -> None:
    found = compare(make_run(), make_run(**changes))
    assert not found.fair
    assert any(says in w for w in found.warnings)


@pytest.mark.parametrize(
    "change_",
    [{"threads": 1}, {"profile": "interactive"}, {"cpu": "another"}, {"torch": "2.12"}, {"environment": {}}],
)
def test_another_machine_or_setting_makes_it_unfair(make_run: Make, change_: dict[str, Any]) -> None:
    a = make_run(kind="bench")
    assert a.provenance is not None and compare(a, a).fair
    assert not compare(a, replace(a, provenance=replace(a.provenance, **change_))).fair


def sampled(run: Run, **sampling: Any) -> Run:
    """The run with these sampling settings."""
    out = copy.deepcopy(run.outputs[0])
    out["sampling"].update(sampling)
    return replace(run, outputs=(out,))


def test_seeds_differ_only_where_something_is_drawn(make_run: Make) -> None:
    a, b = make_run(), make_run(seed=4)
    assert not any("seed" in w for w in compare(a, b).warnings)
    warm = [sampled(r, temperature=0.5) for r in (a, b)]
    assert any("seed differs: 3 against 4" in w for w in compare(*warm).warnings)
    assert not compare(*warm).apart  # another draw of the same work


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda r: replace(r, model="big"), "model big instead of tiny"),
        (lambda r: replace(r, dtype="float32"), "dtype float32 instead of bfloat16"),
        (lambda r: replace(r, prompts=("Twice",)), "another prompt"),
        (lambda r: sampled(r, temperature=0.8, top_p=0.9), "temperature 0.8 instead of 0, top_p 0.9"),
        (lambda r: replace(r, kind="bench"), "a bench run, not a generate run"),
        (lambda r: replace(r, provenance=replace(r.provenance, threads=1)), "1 instead of 2 threads"),
    ],
)
def test_nothing_is_called_faster_between_runs_of_different_work(
    make_run: Make, other: Callable[[Run], Run], says: str
) -> None:
    a = make_run()
    b = other(replace(a, metrics=(replace(a.metrics[0], value=250.0), *a.metrics[1:])))
    found = compare(a, b)
    assert found.headline.startswith(f"not comparable: {says}")
    assert "faster" not in found.to_text()
    speed = found.delta("decode_speed")
    assert speed is not None and (speed.direction, speed.words) == ("changed", "2.5×")


def test_several_comparisons_say_what_is_unfair_once_and_how_often(make_run: Make) -> None:
    a = make_run()
    others = [make_run(prompt="Twice"), make_run(prompt="Twice", dtype="float32"), make_run(dtype="float32")]
    lines = to_text([compare(a, b) for b in others]).splitlines()
    unfair = [line.removeprefix("not a fair comparison: ") for line in lines if line.startswith("not a fair")]
    assert unfair == [
        "The dtype differs: bfloat16 against float32. (2 of 3)",
        "The prompt differs: 'Once' against 'Twice'. (2 of 3)",
        "Times come from two separate runs; ratios are quoted from one interleaved run. (3 of 3)",
    ]


def test_what_follows_from_a_difference_is_not_said_again(make_run: Make) -> None:
    a = make_run()
    assert a.provenance is not None
    elsewhere = replace(a.provenance, profile="interactive", environment={"OMP_WAIT_POLICY": "active"})
    b = make_run(kind="bench", model="other", weight_hash="x", outputs=(), prompts=(), provenance=elsewhere)
    b = replace(b, plan={"kind": "exact", "limits": {"kv_pool_tokens": 1}})
    assert [w.partition(" differs")[0] for w in compare(a, b).warnings][:3] == [
        "The kind of run",
        "The model",
        "The profile",
    ]
    assert not any(word in w for w in compare(a, b).warnings for word in ("weights", "Limits", "environment"))


def test_html_escapes_every_text(make_run: Make) -> None:
    evil = "<img src=x onerror=alert(1)>"
    html = compare(make_run(model=evil), make_run(model=evil, weight_hash=evil))._repr_html_()
    assert "<img" not in html and "&lt;img" in html


def test_it_is_reached_from_the_top(make_run: Make) -> None:
    found = workbench.compare(make_run(), make_run())
    assert found.to_dict()["rows"] == found.to_rows() and found.numerics == ("fast", "fast")
