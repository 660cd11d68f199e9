"""Path confidence, reliability and side choices against hand counts."""

from dataclasses import replace
from itertools import pairwise

import pytest

from workbench.spec.events import DraftRecord
from workbench.speculative.paths import EDGES, foreseen, kept_choices, path_confidence, reliability
from workbench.speculative.stats import acceptance

# Two children of the root; two below the first, one below the second. The root's second child and its one are
# kept.
TREE = DraftRecord(
    "r", (5, 6, 7, 8, 9), (-1, -1, 0, 0, 1), (1, 4), 3, "toy", "r3", chances=(0.5, 0.3, 0.5, 0.25, 1.0)
)


def test_a_path_is_worth_the_product_of_its_chances():
    assert path_confidence(TREE) == pytest.approx((0.5, 0.3, 0.25, 0.125, 0.3))
    assert foreseen(TREE) == pytest.approx(1.475)
    assert path_confidence(replace(TREE, chances=())) == ()


def test_every_node_is_in_one_bin_by_the_verdict():
    bins = reliability([TREE, replace(TREE, accepted=(0, 3), emitted=1), replace(TREE, chances=())])
    assert [(b.low, b.high) for b in bins] == list(pairwise(EDGES))
    found = {b.low: (b.nodes, b.accepted) for b in bins if b.nodes}
    assert found == {0.1: (2, 1), 0.2: (6, 2), 0.4: (2, 1)}
    (three,) = [b for b in bins if b.low == 0.2]
    assert three.foreseen == pytest.approx(2 * (0.3 + 0.25 + 0.3) / 6) and three.share == pytest.approx(1 / 3)
    assert bins[-1].foreseen is None and bins[-1].share is None


def test_a_certain_node_is_in_the_last_bin():
    (sure,) = [b for b in reliability([replace(TREE, chances=(1.0,) * 5)]) if b.nodes]
    assert (sure.high, sure.nodes, sure.accepted) == (1.0, 5, 2)


def test_side_choices_are_those_behind_a_first_child_and_add_up_to_the_survivors():
    records = [TREE, replace(TREE, accepted=(0, 2)), replace(TREE, accepted=(0, 3), emitted=1)]
    records.append(DraftRecord("r", (1, 2, 3), (-1, 0, 1), (0, 1, 2), 4, "toy", "r3"))
    rows = kept_choices(records)
    assert [(c.depth, c.first, c.side) for c in rows] == [(1, 3, 1), (2, 3, 0), (3, 1, 0)]
    assert tuple(c.first + c.side for c in rows) == acceptance(records).survivors
    assert kept_choices([]) == ()
