"""Prompt lookup against a brute-force search, and the drafter's protocol."""

import random
import sys

import pytest

from workbench.engine.draft_seams import DraftContext
from workbench.spec.errors import InvariantError, OptionError
from workbench.speculative.ngram import SPEC, Config, NgramIndex, bind


def propose(drafter, seq, ids, room=99):
    (tree,) = drafter.propose([DraftContext(seq, ids, room, True)])
    return None if tree is None else list(tree.tokens)


@pytest.mark.parametrize(
    ("history", "draft"), [([1], None), ([1, 2, 3], None), ([7, 7, 7], [7]), ([1, 2, 9, 1, 2], [9, 1, 2])]
)
@pytest.mark.parametrize("match", ["latest", "first"])
def test_spd_19_short_histories_no_match_and_no_self_match(history, draft, match):
    drafter = bind(Config(min_n=2, max_n=3, match=match))
    drafter.begin(0, history)
    assert propose(drafter, 0, history) == draft
    one_by_one = bind(Config(min_n=2, max_n=3, match=match))
    one_by_one.begin(0, [])
    for token in history:
        one_by_one.commit(0, [token])
    assert propose(one_by_one, 0, history) == draft


def oracle(ids, config, room):
    """Longest n-gram that ends ``ids`` and occurs earlier, by looking everywhere."""
    for n in range(config.max_n, config.min_n - 1, -1):
        ends = [e for e in range(n, len(ids)) if ids[e - n : e] == ids[-n:]]
        if ends:
            end = ends[-1] if config.match == "latest" else ends[0]
            return ids[end : end + min(config.k, room)]
    return None


@pytest.mark.parametrize("seed", range(40))
def test_spd_19_equals_a_brute_force_search(seed):
    rng = random.Random(seed)
    low = rng.randint(1, 3)
    config = Config(k=rng.randint(1, 6), min_n=low, max_n=low + rng.randint(0, 3),
                    match=rng.choice(["latest", "first"]))  # fmt: skip
    drafter, ids = bind(config), rng.choices(range(3), k=rng.randint(0, 10))
    drafter.begin(5, ids)
    for _ in range(40):
        room = rng.randint(1, 8)
        assert propose(drafter, 5, ids, room) == (oracle(ids, config, room) or None)
        gained = rng.choices(range(3), k=rng.randint(1, 4))
        ids = ids + gained
        drafter.commit(5, gained)


def test_spd_10_only_ids_of_the_sequence_are_proposed():
    drafter = bind(Config())
    ids = [49151, 0, 49151, 0, 3, 49151]
    drafter.begin(0, ids)
    assert set(propose(drafter, 0, ids)) <= set(ids)


def test_the_longest_ngram_wins_and_match_picks_the_occurrence():
    ids = [1, 2, 3, 9, 2, 3, 8, 3, 7, 1, 2, 3]
    for match, config, want in (
        ("latest", {"max_n": 3}, [9]), ("latest", {"max_n": 2}, [8]), ("latest", {"max_n": 1}, [7]),
        ("first", {"max_n": 2}, [9]), ("first", {"max_n": 1}, [9]),
    ):  # fmt: skip
        drafter = bind(Config(k=1, match=match, **config))
        drafter.begin(0, ids)
        assert propose(drafter, 0, ids) == want, (match, config)


def test_the_draft_is_cut_at_the_room():
    drafter = bind(Config(k=4))
    assert drafter.max_draft == 4
    ids = [1, 2, 3, 4, 5, 6, 1]
    drafter.begin(0, ids)
    assert propose(drafter, 0, ids, 99) == [2, 3, 4, 5]
    assert propose(drafter, 0, ids, 2) == [2, 3]
    assert propose(drafter, 0, ids, 0) is None


def test_sequences_are_apart_and_begin_starts_over():
    drafter = bind(Config(min_n=1, max_n=2))
    drafter.begin(1, [1, 2, 1])
    drafter.begin(2, [3, 4, 3])
    trees = drafter.propose([DraftContext(1, [1, 2, 1], 9, True), DraftContext(2, [3, 4, 3], 9, False)])
    assert [t.tokens for t in trees] == [(2, 1), (4, 3)]
    assert trees[0].is_chain and trees[0].source == "ngram" and trees[0].q is None
    drafter.begin(1, [5, 6])
    assert propose(drafter, 1, [5, 6]) is None


def test_proposing_leaves_no_trace():
    drafter = bind(Config())
    ids = [1, 2, 3, 1, 2]
    drafter.begin(0, ids)
    before = drafter.nbytes()
    assert propose(drafter, 0, ids) == propose(drafter, 0, ids)
    assert drafter.nbytes() == before


def test_a_broken_engine_is_told():
    drafter = bind(Config())
    with pytest.raises(InvariantError, match="never told that sequence 4 began"):
        drafter.commit(4, [1])
    drafter.begin(4, [1, 2])
    with pytest.raises(InvariantError, match="2 of 3 committed ids of sequence 4"):
        propose(drafter, 4, [1, 2, 3])
    drafter.forget(4)
    drafter.forget(4)
    with pytest.raises(InvariantError):
        propose(drafter, 4, [1, 2])


def test_bytes_are_those_of_the_containers_and_go_with_the_sequence():
    drafter = bind(Config(min_n=2, max_n=2))
    drafter.begin(0, list(range(1000, 1400)))
    index = drafter._indexes[0]
    entries = index._ends
    held = sum(sys.getsizeof(k) + sys.getsizeof(v) for k, v in entries.items())
    assert drafter.nbytes() == held + sys.getsizeof(entries) + sys.getsizeof(index._ids)
    assert len(entries) == 398
    drafter.forget(0)
    assert drafter.nbytes() == 0


def test_lengths_that_cross_are_refused():
    with pytest.raises(OptionError, match=r"min_n = 4 is above ngram.max_n = 3"):
        bind(Config(min_n=4))


def test_work_per_step_does_not_grow_with_the_history():
    """Counted in table look-ups: a long history costs what a short one costs."""

    class Counting(dict):
        lookups = 0

        def get(self, *args):
            Counting.lookups += 1
            return super().get(*args)

    costs = []
    for length in (50, 5000):
        index = NgramIndex(Config(max_n=3))
        index.extend(range(length))
        index._ends = Counting(index._ends)
        Counting.lookups = 0
        index.followers(10)
        costs.append(Counting.lookups)
    assert costs == [3, 3]


def test_the_spec_states_its_claims_with_conditions():
    assert SPEC.id == "ngram" and SPEC.kind == "exact" and SPEC.seam == "drafter"
    assert all(c.conditions and c.source.startswith("https://") for c in SPEC.claims)
