"""The short way in: measuring from a script, with nothing of a notebook."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import measure
from workbench.core.kv_runs import RatePoint, frontier
from workbench.spec.errors import RecipeError
from workbench.spec.recipe import Recipe

SETTINGS = measure.QualitySettings(context=70, score=20, windows=2, greedy=0)


def ids(n: int) -> list[int]:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def test_a_run_per_method_with_provenance_and_progress(open_session: Any) -> None:
    session, told = open_session(), []
    runs = measure.p1(
        session, "kv_int8", Recipe.of("kv_fp8"), ids=ids(300), settings=SETTINGS,
        tell=lambda fraction, what: told.append((fraction, what)),
    )  # fmt: skip
    assert [r.subject for r in runs] == ["kv_int8", "kv_fp8"] and all(r.kind == "measure" for r in runs)
    assert all(r.provenance is not None and r.weight_hash and r.plan["protocol"] == "p1" for r in runs)
    assert told and all(0 <= fraction <= 1 for fraction, _ in told) and any("kv_int8" in w for _, w in told)
    point = RatePoint.of(runs[0])
    assert point is not None and point.technique == point.method == "kv_int8" and point.windows == 2
    assert point.spread[0] <= point.kl <= point.spread[1]
    with pytest.raises(RecipeError):
        measure.p1(session, "ngram", ids=ids(300), settings=SETTINGS)


def test_a_sweep_of_one_technique(open_session: Any, tmp_path: Path) -> None:
    points = measure.Points(tmp_path / "points.jsonl")
    runs = measure.sweep(open_session(), ["kv_fp8"], ids=ids(300), settings=SETTINGS, points=points)
    assert [r.subject for r in runs] == [str(m) for m in measure.grid(["kv_fp8"])]
    assert len(points) == 2 * len(runs)


def test_needles_from_a_script(open_session: Any) -> None:
    settings, told = measure.NeedleSettings(context=90, depths=2, trials=1), []
    text = "The quick brown fox jumps over the lazy dog. " * 40
    runs = measure.needle(
        open_session(), "kv_int8", Recipe.of("rtn"), text=text, settings=settings,
        tell=lambda fraction, what: told.append(what),
    )  # fmt: skip
    assert [r.subject for r in runs] == ["kv_int8", "rtn"] and {"plain", "kv_int8", "rtn"} <= set(told)
    assert all(r.plan["protocol"] == "needle" and r.plan["needle"]["valid"] is False for r in runs)


def test_quality_of_a_recipe_is_no_point(open_session: Any) -> None:
    run = measure.quality(open_session(), Recipe.of("kv_int8"), ids=ids(300), settings=SETTINGS)
    assert run.metric("kl") is not None and RatePoint.of(run) is None


def point(codec: float, kl: float, whole: float = 1.0) -> RatePoint:
    return RatePoint("t", f"{codec}/{kl}", codec, whole, kl, (kl, kl), 0.0, 100.0, 1)


def test_the_frontier_is_what_no_other_beats_in_both() -> None:
    a, b, c, d = point(2, 0.1, 4), point(4, 0.2, 3), point(3, 0.3, 2), point(4, 0.5, 1)
    assert frontier([d, c, b, a]) == (a, b)
    assert frontier([a, b, c, d], whole=True) == (a,)
    assert frontier([a, a]) == (a,) and frontier([]) == ()


def test_it_needs_nothing_of_a_notebook() -> None:
    code = (
        "import sys; from workbench import measure; measure.grid()\n"
        "print([m for m in ('ipywidgets', 'anywidget', 'plotly', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
