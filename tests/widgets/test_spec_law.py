"""Rules side by side: exact ones to the last digit, lossy ones and imitations visibly not, known values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.core import catalog
from workbench.spec.errors import OptionError
from workbench.speculative import imitations, predict
from workbench.widgets.spec_views.rule_law import RuleLaws, law_of_rules

P, Q = (0.5, 0.25, 0.15, 0.1), (0.25, 0.4, 0.2, 0.15)


@pytest.fixture(scope="module")
def laws() -> RuleLaws:
    return law_of_rules(P, Q, 2)


def test_every_rule_of_the_catalogue_is_there_and_is_what_it_claims(laws: RuleLaws) -> None:
    options = {o.name: o for o in catalog.get("verify").options}
    for rule in options["rule"].choices:
        assert rule == "auto" or any(r.rule == rule for r in laws.rows)
    assert any(r.rule.startswith("r1") and r.zero for r in laws.rows)
    for row in laws.rows:
        if row.kind == "exact":
            assert row.distance < 1e-14, row.name
        else:
            assert row.distance > 1e-2, row.name
    wrong = {r.rule for r in laws.rows if r.kind is None}
    assert wrong == {*imitations.SAMPLED_CHAINS, *imitations.DRAFTS}
    assert all("typical" in r.rule for r in laws.rows if r.kind == "lossy")


def test_acceptance_is_one_minus_the_distance_of_the_laws(laws: RuleLaws) -> None:
    values = {name: value for name, value, _ in laws.acceptance().rows}
    assert values["α: first draft kept, enumerated"] == pytest.approx(0.75, abs=1e-12)
    assert values["1 - TV(p, q)"] == pytest.approx(0.75) == values["Σ min(p, q)"]
    tree = values["1 + Σ over nodes of p multiplied along the path"]
    assert tree == pytest.approx(1 + 0.75 * (1 + 0.25))  # q's likeliest two have 0.25 + 0.5 of p
    assert tree == pytest.approx(
        values["tokens a round, tree of q's likeliest two and one, r3, enumerated"], abs=1e-12
    )
    assert laws.row("r2").accepted == pytest.approx(predict.expected_tokens(0.75, 2) - 1, abs=1e-12)


def test_blocks_keep_more_than_tokens_as_in_the_paper() -> None:
    two = law_of_rules((1 / 3, 2 / 3), (2 / 3, 1 / 3), 2)
    assert two.row("r2").accepted == pytest.approx(10 / 9)
    assert two.row("r5").accepted == pytest.approx(11 / 9)


def test_a_perfect_drafter_is_always_kept() -> None:
    same = law_of_rules(P, P, 2)
    assert same.row("r2").accepted == pytest.approx(2) and same.alpha == pytest.approx(1)
    assert same.row("r4").accepted < 1  # sample and match wastes it


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_figures_put_rounding_apart_from_wrong(laws: RuleLaws, theme: Any) -> None:
    data = json.loads(laws.figure(theme).to_json())["data"]
    exact, lossy, wrong = (t for t in data if t["type"] == "scatter")
    assert max(exact["x"]) < 1e-14 < 1e-2 < min(*lossy["x"], *wrong["x"])
    assert len({t["marker"]["symbol"] for t in (exact, lossy, wrong)}) == 3
    bars = json.loads(laws.figure_first(theme).to_json())["data"]
    assert bars[0]["y"] == pytest.approx(list(P)) == bars[2]["y"]
    assert all(b["y"] != pytest.approx(list(P), abs=1e-6) for b in bars[3:]) and len(bars) > 4


@pytest.mark.parametrize(
    ("p", "q", "gamma", "says"),
    [
        ((0.5, 0.6), (0.5, 0.5), 2, "no law"),
        ((1.0,), (1.0,), 2, "no law"),
        ((0.5, 0.5), (0.2, 0.3, 0.5), 2, "q 3"),
        ((0.5, 0.5), (0.5, 0.5), 0, "γ = 0"),
        ((0.5, 0.5), (0.5, 0.5), 13, "at most 6,000"),
    ],
)
def test_what_cannot_be_enumerated_says_why(p: Any, q: Any, gamma: int, says: str) -> None:
    with pytest.raises(OptionError) as err:
        law_of_rules(p, q, gamma)
    assert says in f"{err.value.message} {err.value.hint}"


def test_fields_enumerate_again_and_refuse_in_words(laws: RuleLaws) -> None:
    pytest.importorskip("ipywidgets")
    from workbench.widgets.spec_views.law_live import explorer, read_law

    box = explorer(laws)
    assert box._repr_mimebundle_()["text/plain"] == "Rules for p, q and γ of your own: γ = 2"
    p, q, gamma, shown = box.children
    assert "0.7500" in shown.value and "imitation" in shown.value
    p.value, q.value = "2, 1", "1, 2"
    assert "0.6667" in shown.value
    gamma.value = 1
    assert "2 tokens" in shown.value
    q.value = "1, <b>"
    assert "not a list of numbers" in shown.value and "<b>'" not in shown.value
    assert read_law("p", "1; 3") == [0.25, 0.75]
    with pytest.raises(OptionError, match="is no law"):
        read_law("p", "0, 0")
