"""The panel's drafts: live from its events, what is on screen is what the run says in the end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.widgets.spec_views.panel_drafts import ROUNDS


def shown(panel: Any) -> dict[str, Any]:
    assert panel.flush()
    drafts: dict[str, Any] = panel._gui.live.drafts
    return drafts


def test_the_tab_fills_while_a_run_drafts_and_agrees_with_it(panel: Any) -> None:
    panel.set("ngram")
    run = panel.run(max_tokens=12).result(10)
    tab = shown(panel)
    a = run.acceptance
    assert tab["survival"] == pytest.approx(a["survival"]) and tab["kind"] == "exact"
    assert len(tab["rounds"]) == a["steps"] and tab["first"] == 1
    assert sum(r + w for r, w in tab["lengths"]) == a["steps"]
    assert sum(t[-1] for t in tab["times"]) == len(run.token_ids)
    assert f"{a['accepted']} of {a['drafted']} kept" in tab["table"]["note"]
    assert tab["rounds"][-1]["words"].startswith(f"round {a['steps']}, step")
    assert [n[4] for n in tab["rounds"][0]["nodes"]] == ["root", "accepted", "rejected"]
    assert json.dumps(tab)
    draft = panel._gui.live.meters["draft"]
    assert (draft["rule"], draft["kind"]) == (run.steps[-1]["drafts"][0]["rule"], "exact")


def test_rounds_on_screen_are_the_latest_and_numbers_are_of_all(panel: Any) -> None:
    panel.set("ngram")
    run = panel.run(max_tokens=2 * ROUNDS + 20).result(20)
    tab = shown(panel)
    rounds = run.acceptance["steps"]
    assert rounds > ROUNDS == len(tab["rounds"]) and tab["first"] == rounds - ROUNDS + 1
    assert tab["rounds"][0]["words"].startswith(f"round {tab['first']},")
    assert sum(r + w for r, w in tab["lengths"]) == rounds


def test_a_run_without_drafts_empties_it(panel: Any) -> None:
    panel.set("ngram")
    panel.run().result(10)
    assert shown(panel)["rounds"]
    panel.set("ngram", False)
    panel.run().result(10)
    assert shown(panel) == {}


@pytest.mark.parametrize("view", ["draft_tree", "lengths", "round_time", "acceptance"])
def test_the_panel_gives_the_same_as_figure_and_table(panel: Any, view: str) -> None:
    panel.set("ngram")
    run = panel.run().result(10)
    assert json.loads(panel.to_figure(view).to_json())["data"]
    assert len(panel.to_table(view)) > 0
    if view == "draft_tree":
        assert len(panel.to_table(view)) == run.acceptance["steps"]
