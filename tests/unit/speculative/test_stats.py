"""Acceptance statistics against hand counts."""

from dataclasses import replace

import pytest

from workbench.spec.events import DraftRecord, RequestEvent, StepEvent, TokenInfo
from workbench.speculative.stats import acceptance, by_source, from_events


def chain(n, accepted, emitted=None, source="ngram", expected=()):
    emitted = accepted + 1 if emitted is None else emitted
    return DraftRecord(
        "r", tuple(range(n)), tuple(range(-1, n - 1)), tuple(range(accepted)), emitted, source, "r3", expected
    )


def test_spd_06_tokens_after_what_ended_the_request_do_not_count():
    """d1, d2, stop, d4, d5 all match: three tokens are emitted, three of five accepted.

    (Behind an end token nothing is drafted, so that three of three are: the engine's rows say so.)
    """
    stats = acceptance([chain(5, 5, emitted=3)])
    assert (stats.emitted, stats.tau, stats.accepted, stats.drafted) == (3, 3.0, 3, 5)
    assert stats.rate == 3 / 5
    assert stats.cut == 1
    assert stats.survivors == (1, 1, 1, 0, 0)


def test_textbook_definitions():
    stats = acceptance([chain(3, 3), chain(3, 1), chain(3, 0), chain(2, 2)], plain=4)
    assert stats.tau == pytest.approx(10 / 4) == 1 + sum(stats.survival)
    assert stats.rate == 6 / 11
    assert stats.survival == (3 / 4, 2 / 4, 1 / 4)
    assert stats.conditional == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert stats.histogram == {2: (0, 0, 1), 3: (1, 1, 0, 1)}
    assert stats.tokens_per_forward == (10 + 4) / (4 + 4)
    assert stats.cut == 0


def test_alpha_is_the_mean_over_reached_positions():
    stats = acceptance([chain(2, 0, expected=(0.5,)), chain(2, 2, expected=(0.9, 1.0))])
    assert stats.alpha == pytest.approx(2.4 / 3)


def test_spd_06_alpha_ends_where_the_block_was_cut():
    """d1, end, d3 all match: the place of d3 was judged, but nothing was emitted from it."""
    stats = acceptance([chain(3, 3, emitted=2, expected=(0.9, 0.7, 0.1))])
    assert (stats.expected_n, stats.alpha) == (2, pytest.approx(0.8))


@pytest.mark.parametrize(
    ("emitted", "tried"), [(1, (0.2, 0.5)), (2, (0.2, 0.5, 0.4, 0.6)), (3, ...), (4, ...)]
)
def test_spd_06_alpha_of_a_tree_ends_where_the_path_was_cut(emitted, tried):
    """Nodes 1, 4 and 6 were kept; of the root's children two were tried, then 3 and 4, then 5 and 6."""
    every = (0.2, 0.5, 0.4, 0.6, 0.1, 0.3)
    parents = (-1, -1, -1, 1, 1, 4, 4)
    tree = DraftRecord("r", tuple(range(7)), parents, (1, 4, 6), emitted, "toy", "r3", every)
    counted = every if tried is ... else tried
    stats = acceptance([tree])
    assert stats.expected_n == len(counted) and stats.alpha == pytest.approx(sum(counted) / len(counted))
    judged_at_once = replace(tree, rule="typical", mismatch=(0.1, 0.1, 0.1))
    assert acceptance([judged_at_once]).expected_n == len(every)


def test_a_tree_counts_nodes_as_drafted_and_levels_as_positions():
    tree = DraftRecord("r", (1, 2, 3, 4), (-1, -1, 1, 1), (1, 3), 3, "toy", "r3")
    stats = acceptance([tree])
    assert (stats.drafted, stats.accepted, stats.tau) == (4, 2, 3.0)
    assert stats.survival == (1.0, 1.0) and stats.histogram == {2: (0, 0, 1)}


def test_ratios_over_nothing_are_none_not_numbers():
    stats = acceptance([])
    assert (stats.tau, stats.rate, stats.alpha, stats.tokens_per_forward) == (None,) * 4
    assert stats.survival == stats.conditional == ()
    assert acceptance([], plain=3).tokens_per_forward == 1.0
    assert acceptance([chain(2, 0), chain(2, 0)]).conditional == (0.0,)


def test_sources_are_kept_apart():
    stats = by_source([chain(2, 2), chain(2, 0, source="draft"), chain(2, 1)])
    assert list(stats) == ["draft", "ngram"]
    assert (stats["draft"].tau, stats["ngram"].tau) == (1.0, 2.5)


def test_an_event_stream_tells_the_same():
    step = StepEvent(0, 0.0, 4, 0, 1, 3, 1, 0, {}, 0, 0, 0, {}, drafts=(chain(3, 2),))
    tokens = tuple(
        TokenInfo(i, i, s, 0) for i, s in enumerate(("plain", "accepted", "accepted", "corrected"))
    )
    stats = from_events([step, RequestEvent("r", 0, 0.0, tokens)])
    assert (stats.plain, stats.tau, stats.tokens_per_forward) == (1, 3.0, 2.0)


def test_mismatch_counts_what_was_emitted_and_is_none_for_exact_rules():
    lossy = DraftRecord("r", (1, 2, 3), (-1, 0, 1), (0, 1, 2), 2, "toy", "typical", (), (0.5, 0.25, 0.9))
    assert acceptance([chain(2, 2)]).mismatch is None
    assert acceptance([lossy]).mismatch == pytest.approx(0.75 / 2)  # the third was cut
    assert acceptance([lossy, chain(2, 1)], plain=4).mismatch == pytest.approx(0.75 / 8)


def test_accepted_lengths_over_all_depths():
    assert acceptance([chain(3, 3), chain(3, 1), chain(3, 0), chain(2, 2), chain(1, 0)]).lengths == (
        2,
        1,
        1,
        1,
    )
    assert acceptance([]).lengths == ()
