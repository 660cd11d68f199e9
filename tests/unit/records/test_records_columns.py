"""Columns are the exact inverse of rows, and refuse to unfold into more than was promised."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.records.columns import MAX_ROWS, expand, shrink
from workbench.spec.errors import RecordError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same_json(a: object, b: object) -> bool:
    return json.dumps(a) == json.dumps(b)


@given(st.lists(VALUES, max_size=6))
def test_expand_undoes_shrink(rows: list[object]) -> None:
    assert same_json(expand(shrink(rows), len(rows)), rows)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "a": st.integers(),
                "b": st.fixed_dictionaries({"x": st.floats(allow_nan=False)}),
                "c": st.lists(st.fixed_dictionaries({"i": st.integers()}), max_size=2),
            }
        ),
        max_size=8,
    )
)
def test_rows_of_one_shape_keep_types_and_order(rows: list[dict[str, object]]) -> None:
    assert same_json(expand(shrink(rows), len(rows)), rows)


def test_equal_values_of_other_types_stay_apart() -> None:
    assert expand(shrink([1, 1.0, True]), 3) == [1, 1.0, True]
    assert [type(v) for v in expand(shrink([1, 1.0, True]), 3)] == [int, float, bool]


def test_rows_do_not_share_their_lists() -> None:
    rows = expand(shrink([{"a": []}, {"a": []}]), 2)
    rows[0]["a"].append(1)
    assert rows[1]["a"] == []


@pytest.mark.parametrize(
    ("column", "n"),
    [
        ({"all": 1}, MAX_ROWS + 1),
        ({"all": [0] * 100}, MAX_ROWS),
        ({"all": 1}, -1),
        ({"all": 1}, True),
        ({"each": [1]}, 2),
        ({"lengths": {"all": 10**6}, "items": {"all": {}}}, 1000),
        ({"lengths": {"all": -1}, "items": {"all": {}}}, 2),
        ({"keys": {}}, 1),
        ({"keys": {"a": {"each": []}}}, 1),
        (None, 1),
        ([1], 1),
    ],
)
def test_malformed_or_inflated_columns_are_refused(column: object, n: int) -> None:
    with pytest.raises(RecordError):
        expand(column, n)
