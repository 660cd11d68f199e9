"""The roofline: goals and roofs from the cases, points only from a report, and bad reports refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.kernels.bench import record, roofline, roster
from workbench.spec.errors import RecordError
from workbench.widgets.kernel_views.roofline import Roofline, draw_roofline

KERNELS = ("fa3_fwd", "w4a16")


@pytest.fixture(scope="module")
def planned() -> Roofline:
    return draw_roofline(kernels=KERNELS)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """What a chip with two thirds of the data sheet's rates would have written, at half of its own floor."""
    ceilings = {name: {"rate": rate * 2 / 3} for name, rate in roofline.DATA_SHEET.items()}
    rows = []
    for case in roster.chosen(KERNELS):
        row = record.row_of(case)
        if case.timed:
            floor = roofline.floor(case.cost, case.unit, record.ceilings_of(ceilings)).seconds
            rate, unit = roofline.rate(case.cost, case.unit, 2 * floor)
            row |= {"state": "measured", "seconds": 2 * floor, "rate": rate, "rate_unit": unit}
        rows.append(row)
    found = {"schema": record.SCHEMA, "cases": rows, "ceilings": ceilings, "device": {"name": "a chip"}}
    (tmp_path / "results.json").write_text(json.dumps(found))
    return tmp_path


def marks(figure: Any, word: str) -> list[tuple[float, float]]:
    return [p for t in figure.data if t.name and word in t.name for p in zip(t.x, t.y, strict=True)]


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_without_a_report_nothing_is_called_measured(planned: Roofline, theme: Any) -> None:
    figure = planned.figure(theme)
    assert planned.tag == "claimed" and "claimed" in figure.layout.title.text
    assert not marks(figure, "measured") and not marks(planned.shares(theme), "measured")
    assert {t.line.dash for t in figure.data if t.name and "TFLOP/s" in t.name} == {"longdash"}
    targets = marks(figure, "target")
    cases = [c for c in roster.chosen(KERNELS) if c.timed and c.goals and c.goals[0].of == ""]
    assert len(targets) == len(cases) > 5
    for x, y in targets:
        assert y < min(roofline.DATA_SHEET["bytes"] * x, roofline.DATA_SHEET["fp8"]) / 1e12
    assert {r["measured"] for r in planned.table().to_dicts()} == {"–"}
    assert "Nothing here was measured" in planned.table().note


def test_goals_in_bytes_a_second_are_drawn_as_operations(planned: Roofline) -> None:
    row = next(r for r in planned.rows if r["bound"] == "bytes")
    (goal,) = (g for g in row["goals"] if g["of"] == "")
    x = row["flops"] / row["bytes"]
    assert (x, goal["target"] * x) in marks(planned.figure(), "w4a16: target")


@pytest.mark.parametrize("folder", [True, False])
def test_a_report_brings_its_roofs_and_its_points(report: Path, folder: bool) -> None:
    found = draw_roofline(report if folder else str(report / "results.json"), KERNELS)
    assert found.tag == "measured" and found.device == "a chip"
    figure = found.figure()
    assert {t.line.dash for t in figure.data if t.name and "TFLOP/s" in t.name} == {"solid"}
    measured = [m for k in KERNELS for m in marks(figure, f"{k}: measured")]
    assert len(measured) == len([r for r in found.rows if r.get("seconds")]) == len(found.rows)
    assert all(x == pytest.approx(0.5) for x, _ in marks(found.shares(), "measured"))
    assert all(r["measured"] != "–" for r in found.table().to_dicts())


def test_what_is_no_report_is_refused(tmp_path: Path, report: Path) -> None:
    for text in ("", "[]", "{}", '{"schema": 0, "cases": [], "ceilings": {}, "device": {}}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(RecordError, match="no report"):
            draw_roofline(tmp_path / "x.json")
    with pytest.raises(RecordError, match="no report"):
        draw_roofline(tmp_path / "gone")
    with pytest.raises(RecordError, match="No timed case"):
        draw_roofline(report, ("hadamard",))
