"""Trees that outlive a round: whatever messages are late, lost, doubled or out of order, no token is taken
for another context than the one it was drafted for.

The drafter here drafts tokens that are a digest of their whole context, so a node in the wrong place shows.
"""

from __future__ import annotations

import math
import random
import zlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workbench.speculative.placement.branches import Outcome, RolloutStats, outcomes, roll_out
from workbench.speculative.placement.evolving_tree import EvolvingTree
from workbench.speculative.placement.messages import ROOT, TailNode, TailStream, VerifyCommit
from workbench.speculative.placement.tails import TailBook

RANKS = 3
VOCAB = 1_000_003


def digest(context, rank=0):
    """The token that is drafted behind a context at a rank: no other context has it."""
    return zlib.crc32(repr((tuple(context), rank)).encode()) % VOCAB


def candidates(context, n=RANKS):
    return [(digest(context, r), math.log((0.6, 0.25, 0.1)[r])) for r in range(n)]


def check_tree(tree: EvolvingTree, committed: list[int]) -> None:
    """Books of a tree: links agree, it is bounded, children are worth no more, tokens fit their context."""
    assert tree.base_len == len(committed)
    assert len(tree) <= tree.max_nodes
    reached, stack = set(), [ROOT]
    while stack:
        at = stack.pop()
        for child in tree.children(at):
            node = tree.nodes[child]
            assert node.parent == at and child not in reached
            assert node.pos == tree.position(at) + 1 <= len(committed) - 1 + tree.max_depth
            assert tree.value(child) <= tree.value(at) + 1e-12
            context = [*committed, *tree.tokens(child)[:-1]]
            assert node.token in [digest(context, r) for r in range(RANKS)]
            reached.add(child)
            stack.append(child)
    assert reached == set(tree.nodes)
    for budget in (1, 3, 8):
        chosen = tree.best(budget)
        assert len(chosen) == min(budget, len(tree))
        assert all(tree.nodes[n].parent in (ROOT, *chosen) for n in chosen)


class Drafter:
    """The drafter's side without a model."""

    def __init__(self, tokens, nodes):
        self.tokens, self.tree = list(tokens), EvolvingTree(len(tokens), max_nodes=nodes, max_depth=6)

    def grow(self, width):
        batch = self.tree.frontier(width)
        contexts = [[*self.tokens, *self.tree.tokens(n)] for n in batch]
        made = []
        for node in batch:
            self.tree.fed(node, None)
        for node, context in zip(batch, contexts, strict=True):
            if node == ROOT or node in self.tree.nodes:
                made += self.tree.add(node, candidates(context))
        return TailStream(1, len(self.tokens), self.tree.tail([n for n in made if n in self.tree.nodes]))

    def commit(self, told: VerifyCommit):
        if told.pre_len != len(self.tokens):
            return None
        self.tokens += told.tokens
        self.tree.reroot(told.tokens)
        return TailStream(1, len(self.tokens), self.tree.tail(self.tree.best(len(self.tree))))


class Interleaved(RuleBasedStateMachine):
    """Two sides and a wire that may delay, double, drop and reorder tails, and delay verdicts."""

    @initialize(nodes=st.integers(1, 12), book=st.integers(1, 12), seed=st.integers(0, 9))
    def start(self, nodes, book, seed):
        self.draft = Drafter([seed], nodes)
        self.book = TailBook(1, [seed], max_nodes=book, max_depth=6, vocab=VOCAB)
        self.tails: list[TailStream] = []
        self.verdicts: list[VerifyCommit] = []

    @rule(width=st.integers(1, 4))
    def grows(self, width):
        self.tails.append(self.draft.grow(width))

    @rule(data=st.data())
    def a_tail_arrives(self, data):
        if self.tails:
            i = data.draw(st.integers(0, len(self.tails) - 1))
            again = data.draw(st.booleans())
            self.book.receive(self.tails[i] if again else self.tails.pop(i))

    @rule(data=st.data())
    def a_verdict(self, data):
        at, tokens = ROOT, []
        for node in self.book.tree.best(8):
            if self.book.tree.nodes[node].parent == at and data.draw(st.booleans()):
                at = node
                tokens.append(self.book.tree.nodes[node].token)
        rank = data.draw(st.integers(0, RANKS))  # the last rank is a token nobody drafts
        tokens.append(digest([*self.book.tokens, *tokens], rank))
        self.verdicts.append(self.book.commit(tokens))

    @rule()
    def a_verdict_arrives(self):
        if self.verdicts and (tail := self.draft.commit(self.verdicts.pop(0))) is not None:
            self.tails.append(tail)

    @invariant()
    def every_token_fits_its_context(self):
        if hasattr(self, "book"):
            check_tree(self.book.tree, self.book.tokens)
            check_tree(self.draft.tree, self.draft.tokens)


TestInterleaved = Interleaved.TestCase


def interleave(events: int, seed: int, receive) -> tuple[TailBook, Drafter]:
    """Random commits and tails, the latter in any order."""
    draw = random.Random(seed)
    draft, book = Drafter([seed], 12), TailBook(1, [seed], max_nodes=12, max_depth=6, vocab=VOCAB)
    tails, verdicts = [], []
    for _ in range(events):
        match draw.choice(("grow", "grow", "tail", "tail", "verdict", "told")):
            case "grow":
                tails.append(draft.grow(draw.randint(1, 3)))
            case "tail" if tails:
                receive(book, tails.pop(draw.randrange(len(tails))))
            case "verdict":
                tokens = book.tree.tokens(draw.choice(chosen)) if (chosen := book.tree.best(4)) else []
                tokens.append(digest([*book.tokens, *tokens], draw.randint(0, 3)))
                verdicts.append(book.commit(tokens))
            case "told" if verdicts and (tail := draft.commit(verdicts.pop(0))):
                tails.append(tail)
    return book, draft


def test_ten_thousand_interleavings_take_nothing_from_a_stale_base() -> None:
    refused = taken = 0

    def receive(book: TailBook, tail: TailStream) -> None:
        before = len(book.tree)
        got = book.receive(tail)
        assert got == 0 or tail.base_len == len(book.tokens)
        assert tail.base_len == len(book.tokens) or len(book.tree) == before
        if got:
            check_tree(book.tree, book.tokens)

    for seed in range(10_000):
        book, _ = interleave(12, seed, receive)
        refused += book.refused["stale"]
        taken += book.taken
    assert refused > 1000 and taken > 1000  # both happen, or nothing was tested


def test_without_the_check_stale_tokens_would_be_taken() -> None:
    def careless(book: TailBook, tail: TailStream) -> None:
        shift = len(book.tokens) - tail.base_len
        moved = tuple(TailNode(n.id, n.parent, n.pos + shift, n.token, n.chance) for n in tail.nodes)
        book.receive(TailStream(tail.stream, len(book.tokens), moved))
        check_tree(book.tree, book.tokens)

    with pytest.raises(AssertionError):
        for seed in range(100):
            interleave(100, seed, careless)


def test_foreseen_outcomes_are_conditioned_on_the_drafts_before_them() -> None:
    draw = random.Random(0)
    stats = RolloutStats()
    for _ in range(200):
        committed = [draw.randint(0, 99)]
        window = []
        for _ in range(draw.randint(0, 4)):
            window.append(digest([*committed, *window], draw.randint(0, 2)))

        def proxy(path, committed=committed):
            return [digest([*committed, *path], r) for r in range(RANKS)]

        def extend(paths, committed=committed):
            out = []
            for path in paths:
                new: list[int] = []
                for _ in range(4):
                    new.append(digest([*committed, *path, *new]))
                out.append(new)
            return out

        kappa = draw.randint(1, 4)
        ends = outcomes(window, proxy, kappa)
        assert len(ends) == len(set(ends)) <= (len(window) + 1) * kappa
        rollout = roll_out(window, ends, extend)
        for accepted in range(len(window) + 1):
            ranked = [t for t in proxy(tuple(window[:accepted])) if t != [*window, None][accepted]]
            for place, token in enumerate([*ranked, -5]):
                found = rollout.reuse(accepted, token)
                assert (found is not None) == (place < kappa and token != -5)
                if found is not None:
                    assert list(found) == extend([(*window[:accepted], token)])[0]
        accepted = draw.randint(0, len(window))
        end = digest([*committed, *window[:accepted]], draw.randint(0, 2))
        assert stats.count(rollout, accepted, end) == rollout.branches.get(Outcome(accepted, end))
    assert 0 < stats.reuse_rate < 1 and stats.wasted > 0
    assert sum(stats.tries.values()) == 200 and stats.used <= stats.drafted
