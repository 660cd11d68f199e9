"""The picture of FP8 errors: measured marks are the measurement, the paper's are open."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.kernels.attention.fp8_error import FORMS
from workbench.spec.errors import OptionError
from workbench.widgets.kernel_views.fp8_error import CLAIMED, FP8Comparison, compare_fp8


@pytest.fixture(scope="module")
def found() -> FP8Comparison:
    return compare_fp8(n=256, dim=64, heads=2, seed=3)


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_marks_are_the_errors_and_claims_are_open(found: FP8Comparison, theme: Any) -> None:
    figure = found.figure(theme)
    drawn = {t.y[0]: (list(t.x), t.marker.symbol) for t in figure.data[:-1]}
    for form in FORMS:
        assert drawn[form.name] == (list(found.errors.by_form[form.name]), "circle")
    claimed = figure.data[-1]
    assert dict(zip(claimed.y, claimed.x, strict=True)) == CLAIMED
    assert claimed.marker.symbol == "circle-open" and "claimed" in claimed.name
    assert f"{found.gain:.2f}×" in figure.layout.title.text


def test_every_number_of_the_table_has_its_tag(found: FP8Comparison) -> None:
    rows = found.table().to_dicts()
    assert [r["tag"] for r in rows] == ["measured"] * 5 + ["claimed"] * 2
    assert rows[0]["gain"].startswith("1.00") and rows[-1]["gain"] == "2.6×"


def test_the_same_seed_gives_the_same_errors_and_one_head_no_spread(found: FP8Comparison) -> None:
    assert compare_fp8(n=256, dim=64, heads=2, seed=3).errors == found.errors
    assert "(" not in compare_fp8(n=128, dim=64, heads=1).table().rows[0][1]


def test_sizes_without_a_hadamard_matrix_are_refused() -> None:
    with pytest.raises(OptionError, match="Hadamard"):
        compare_fp8(n=128, dim=9, heads=1)
