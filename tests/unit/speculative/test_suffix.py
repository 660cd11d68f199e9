"""Suffix decoding against its definition on plain lists: counts, paths, scores, eviction, memory."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.draft_seams import DraftContext
from workbench.spec.errors import InvariantError
from workbench.spec.technique import make_config
from workbench.speculative.occurrences import Occurrences
from workbench.speculative.stats import acceptance, by_source
from workbench.speculative.suffix import SPEC, Config, bind, grow_tree, propose

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5)


def filled(texts, open_end=True):
    seen = Occurrences()
    for i, text in enumerate(texts):
        seen.extend(text)
        if not open_end or i < len(texts) - 1:
            seen.close()
    return seen


def found(texts, pattern):
    """(text, position behind) of every occurrence of ``pattern``: the definition."""
    n = len(pattern)
    return [
        (t, e) for t, text in enumerate(texts) for e in range(n, len(text) + 1) if text[e - n : e] == pattern
    ]


def children(texts, places):
    out = {}
    for t, e in places:
        if e < len(texts[t]):
            out.setdefault(texts[t][e], []).append((t, e + 1))
    return out


def best_chain(texts, suffix, config, room, here=0):
    """The proposal from the definition: every length by itself, every count by scanning the texts."""
    best, score = [], 0.0
    for length in range(1, min(config.depth, len(suffix)) + 1):
        places = found(texts, suffix[-length:])
        most = min(room, config.k, int(length * config.factor + config.offset + 1e-6))
        tokens, probs, prob = [], [], 1.0
        extra = here
        while len(tokens) < most:
            below = children(texts, places)
            if not below:
                break
            token, behind = max(below.items(), key=lambda item: (len(item[1]), item[1][-1]))
            prob *= len(behind) / (len(places) + extra)
            if prob < config.min_prob * (1 - 1e-9):  # rounding is nobody's decision
                break
            tokens.append(token)
            probs.append(prob)
            places, extra = behind, 0
        if tokens and sum(probs) >= score * (1 - 1e-9):
            best, score = tokens, sum(probs)
    return best, score


@given(TEXTS, st.integers(1, 8), st.floats(0.5, 3), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.4]))
def test_the_draft_is_that_of_an_explicit_scan(texts, depth, factor, offset, min_prob):
    config = make_config(
        Config, {"depth": depth, "factor": factor, "offset": offset, "min_prob": min_prob}, "suffix"
    )
    suffix = texts[-1]
    for here, seen in ((0, filled(texts)), (1, filled(texts, open_end=False))):
        draft = propose(seen, suffix[-depth:], config, 12, here)
        tokens, score = best_chain(texts, suffix, config, 12, here)
        assert list(draft.tokens) == tokens
        assert draft.score == pytest.approx(score)
        assert draft.parents == tuple(range(-1, len(tokens) - 1))


@given(TEXTS, st.integers(1, 6))
def test_nodes_are_the_occurrences_of_every_suffix(texts, depth):
    seen = filled(texts)
    nodes = seen.nodes(texts[-1], depth)
    lengths = [n for n, _ in nodes]
    assert lengths == sorted(set(lengths)) and lengths[-1] == min(depth, len(texts[-1]))
    for length in range(1, lengths[-1] + 1):
        places = found(texts, texts[-1][-length:])
        ends = next(ends for n, ends in nodes if n >= length)
        assert len(ends) == len(places)
        counts = {token: len(behind) for token, behind in seen.followers(ends).items()}
        assert counts == {token: len(behind) for token, behind in children(texts, places).items()}


def test_many_occurrences_are_filtered_as_few_are():
    rng = random.Random(3)
    for _ in range(20):
        text = rng.choices(range(3), k=400)
        config = Config(min_prob=0.0)
        assert (
            list(propose(filled([text]), text[-24:], config, 32).tokens)
            == best_chain([text], text, config, 32)[0]
        )


@given(TEXTS, st.data())
def test_forgetting_restores_counts_exactly(texts, data):
    n = data.draw(st.integers(0, len(texts)))
    seen, fresh = filled(texts, open_end=False), filled(texts[n:], open_end=False)
    for _ in range(n):
        seen.forget_oldest()
    assert list(seen.texts())[:-1] == texts[n:] and len(seen) == len(fresh)
    for text in texts:
        for cut in range(1, len(text) + 1):
            a, b = seen.nodes(text[:cut], 5), fresh.nodes(text[:cut], 5)
            assert [(length, len(ends)) for length, ends in a] == [(length, len(ends)) for length, ends in b]
            for (_, mine), (_, theirs) in zip(a, b, strict=True):
                x, y = seen.followers(mine), fresh.followers(theirs)
                assert {t: len(e) for t, e in x.items()} == {t: len(e) for t, e in y.items()}
    if n == len(texts):
        assert seen.nodes([0, 1, 2, 3], 4) == [] and not seen._places


@given(TEXTS, st.integers(1, 10))
def test_trees_hold_the_likeliest_nodes(texts, most):
    """Against all paths up to a depth, by their probability; the set is closed under parents."""
    seen = filled(texts)
    (length, ends), *_ = seen.nodes(texts[-1], 1)
    draft = grow_tree(seen, ends, most, 0.05)
    assert all(-1 <= p < i for i, p in enumerate(draft.parents))
    assert list(draft.probs) == sorted(draft.probs, reverse=True)
    every, todo = [], [(1.0, found(texts, texts[-1][-1:]), 0)]
    while todo:
        prob, places, depth = todo.pop()
        for behind in children(texts, places).values():
            chance = prob * len(behind) / len(places)
            if chance >= 0.05 and depth < most:
                every.append(chance)
                todo.append((chance, behind, depth + 1))
    assert list(draft.probs) == pytest.approx(sorted(every, reverse=True)[:most])
    assert length == 1


def test_what_followed_once_is_expected_half_the_time_and_long_matches_are_drafted_further():
    text = [*range(10, 30), 1, *range(10, 20)]
    draft = propose(filled([text]), text, Config(), 32)
    assert draft.tokens == tuple(range(20, 30)) and draft.matched == 10
    assert draft.score == 10 * 0.5
    assert propose(filled([text]), text, Config(factor=0.3), 32).tokens == (20, 21, 22)
    assert propose(filled([text]), text, Config(offset=2.0), 32).tokens == (*range(20, 30), 1, 10)
    assert propose(filled([text]), text, Config(), 4).tokens == (20, 21, 22, 23)
    assert propose(filled([[1, 2, 3]]), [1, 2, 3], Config(), 8).tokens == ()
    assert propose(Occurrences(), [1, 2], Config(), 8).tokens == ()


def test_frequent_continuations_win_and_the_bar_ends_the_draft():
    text = [5, 1, 2, 9, 5, 1, 3, 9, 5, 1, 2, 8, 5]
    draft = propose(filled([text]), text, Config(factor=4.0), 8)
    assert draft.tokens[:2] == (1, 2)
    assert draft.probs[:2] == pytest.approx((3 / 4, 2 / 4))
    assert propose(filled([text]), text, Config(factor=4.0, min_prob=0.6), 8).tokens == (1,)


def test_a_draft_says_what_it_gives_each_node_given_its_parent():
    drafter = bind(Config(factor=4.0, tree=True))
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    drafter.begin(0, text)
    (tree,) = drafter.propose([DraftContext(0, text, 8, True)])
    chance = dict(zip(zip(tree.parents, tree.tokens, strict=True), tree.chances(), strict=True))
    assert chance[-1, 3] == pytest.approx(2 / 4)  # 1 2 occurs four times, its end among them; 3 follows twice
    assert chance[-1, 4] == pytest.approx(1 / 4)
    assert all(0 < c <= 1 for c in chance.values())


def drafted(drafter, seq, tokens, room=32):
    (tree,) = drafter.propose([DraftContext(seq, tokens, room, True)])
    return tree


def test_spd_19_history_that_is_short_or_does_not_repeat_gives_no_proposal():
    for history, want in (([1], None), ([1, 2, 3], None), ([7, 7, 7], (7,)), ([1, 2, 9, 1, 2], (9, 1))):
        drafter = bind(Config())
        drafter.begin(0, history)
        tree = drafted(drafter, 0, history)
        assert (tree.tokens if tree else None) == want, history
    assert drafted(drafter, 0, history, room=0) is None


def test_earlier_outputs_are_drafted_from_and_named():
    drafter = bind(Config(past_tokens=50))
    drafter.begin(1, [90, 91, 1])
    drafter.commit(1, [2, 3, 4, 5, 6, 7, 8])
    drafter.forget(1)
    drafter.begin(2, [70, 71, 72, 1, 2, 3])
    tree = drafted(drafter, 2, [70, 71, 72, 1, 2, 3])
    assert tree.tokens == (4, 5, 6) and tree.source == "suffix:past"
    drafter.begin(3, [91, 1])
    assert drafted(drafter, 3, [91, 1]).tokens == (2,)  # the prompt of the first request is not kept
    off = bind(Config(past_tokens=0))
    off.begin(1, [1, 2])
    off.commit(1, [3, 4, 5])
    off.forget(1)
    off.begin(2, [9, 1, 2])
    assert drafted(off, 2, [9, 1, 2]) is None


def test_memory_is_bounded_counted_and_given_back():
    drafter = bind(Config(past_tokens=500))
    empty, rng, sizes = drafter.nbytes(), random.Random(0), []
    for seq in range(60):
        drafter.begin(seq, rng.choices(range(50), k=20))
        for _ in range(20):
            drafter.commit(seq, rng.choices(range(50), k=3))
        before = drafter.nbytes()
        drafter.forget(seq)
        sizes.append(drafter.nbytes())
        assert before > sizes[-1] or seq < 10
        assert len(drafter._past) <= 501
    assert max(sizes[20:]) < 1.3 * min(sizes[20:]) and empty < sizes[0]
    ids = [i for text in drafter._past.texts() for i in text]
    assert sum(map(len, drafter._past._places.values())) == len(ids)
    drafter.begin(99, [1, 2])
    drafter.commit(99, list(range(600)))
    drafter.forget(99)  # longer than all that may be kept
    assert next(drafter._past.texts()) == list(range(100, 600))


def test_begin_and_commit_in_pieces_give_the_same_drafts():
    rng = random.Random(5)
    text = rng.choices(range(4), k=120)
    whole, pieces = bind(Config()), bind(Config())
    whole.begin(0, text)
    pieces.begin(0, text[:7])
    for i in range(7, 120, 3):
        pieces.commit(0, text[i : i + 3])
    a, b = (drafted(d, 0, text[:120]) for d in (whole, pieces))
    assert a == b and a is not None
    assert whole.nbytes() == pytest.approx(pieces.nbytes(), rel=0.2)


def test_what_it_was_not_told_is_an_error():
    drafter = bind(Config())
    with pytest.raises(InvariantError, match="never told that sequence 4 began"):
        drafted(drafter, 4, [1])
    drafter.begin(4, [1, 2])
    with pytest.raises(InvariantError, match="has seen 2 of 3 committed ids of sequence 4"):
        drafted(drafter, 4, [1, 2, 3])
    drafter.forget(5)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_engine_output_does_not_depend_on_it(lab, tree, temperature):
    """Ragged acceptance, penalties and a batch; a second run drafts from the outputs of the first."""
    prompts = [(p * 6)[:40] for p in lab.prompts_of(5, seed=8, low=4, high=9)]
    params = {"max_tokens": 40, "temperature": temperature, "seed": 3, "repetition_penalty": 1.05}
    with torch.inference_mode():
        plain = lab.run_engine(lab.make_engine("paged", pool=4096), prompts, **params)
        engine = lab.make_engine("paged", f"suffix:tree={str(tree).lower()},k=8,offset=2", pool=4096)
        for again in (False, True):
            ran = lab.run_engine(engine, prompts, **params)
            assert [ran.ids(f"r{i}") for i in range(5)] == [plain.ids(f"r{i}") for i in range(5)]
            records = [d for s in ran.steps for d in s.drafts]
            assert 0 < acceptance(records).accepted < acceptance(records).drafted
            assert not again or by_source(records)["suffix:past"].accepted > 0
    assert all(s.bytes["draft"] > 0 for s in ran.steps)
    assert SPEC.kind == "exact" and SPEC.seam == "drafter"
