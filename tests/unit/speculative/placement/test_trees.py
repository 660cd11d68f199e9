"""The evolving tree and its messages by hand: order of growth and eviction, re-rooting with KV, wire form."""

from __future__ import annotations

import math

import pytest

from workbench.spec.errors import InvariantError, PayloadError
from workbench.speculative.placement.evolving_tree import EvolvingTree
from workbench.speculative.placement.messages import (
    ROOT,
    Candidates,
    Close,
    DraftSync,
    Ready,
    TailNode,
    TailStream,
    VerifyCommit,
    Worked,
    from_line,
    to_line,
)


def grown(max_nodes: int = 16) -> EvolvingTree:
    """Root -> 10 (.6), 20 (.3); 10 -> 11 (.5), 12 (.4); 11 -> 13 (.9); KV slots 0 (root), 1 (10), 2 (11)."""
    tree = EvolvingTree(5, max_nodes=max_nodes)
    log = math.log
    tree.fed(ROOT, 0)
    ten, _ = tree.add(ROOT, [(10, log(0.6)), (20, log(0.3))])
    tree.fed(ten, 1)
    eleven, _ = tree.add(ten, [(11, log(0.5)), (12, log(0.4))])
    tree.fed(eleven, 2)
    tree.add(eleven, [(13, log(0.9))])
    return tree


def tokens_of(tree: EvolvingTree, nodes: list[int]) -> list[int]:
    return [tree.nodes[n].token for n in nodes]


def test_the_best_leaves_are_expanded_first() -> None:
    tree = grown()
    assert tokens_of(tree, tree.frontier(2)) == [20, 13]  # .3, .27, then .24 of token 12
    assert EvolvingTree(1, max_nodes=4).frontier(8) == [ROOT]


def test_the_subtree_of_a_budget_is_the_likeliest_and_connected() -> None:
    draft = grown().draft(4, "draft")
    assert draft is not None
    assert draft.tokens == (10, 20, 11, 13) and draft.parents == (-1, -1, 0, 2)
    assert draft.confidence == pytest.approx((0.6, 0.3, 0.5, 0.9))


def test_a_hit_keeps_the_subtree_and_its_kv() -> None:
    tree = grown()
    done = tree.reroot([10, 11])
    assert (done.hit, done.matched, done.slots, done.kept, done.dropped) == (True, 2, (0, 1, 2), 1, 2)
    assert tree.base_len == 7 and tree.root_slot == 2 and tree.freed == []
    (left,) = tree.below
    assert tree.nodes[left].token == 13 and tree.value(left) == pytest.approx(math.log(0.9))


def test_a_miss_starts_anew_and_gives_back_what_it_held() -> None:
    tree = grown()
    done = tree.reroot([10, 99])
    assert (done.hit, done.matched, done.slots, done.kept) == (False, 1, (0, 1, None), 0)
    assert tree.freed == [2] and not tree.below and tree.frontier(4) == [ROOT]
    assert (tree.stats.rounds, tree.stats.hits, tree.stats.age) == (1, 0, 0)


def test_leaves_worth_least_go_first_and_the_oldest_of_equals() -> None:
    tree = EvolvingTree(1, max_nodes=3)
    tree.fed(ROOT, 0)
    first, second = tree.add(ROOT, [(1, -2.0), (2, -2.0)])
    tree.add(ROOT, [(3, -0.5), (4, -1.0)])
    assert first not in tree.nodes and second in tree.nodes
    assert tree.stats.evicted == 1
    assert tree.add(ROOT, [(5, -3.0)]) == []  # worth less than all: it finds no place
    assert tree.frontier(8) == [n for n in tree.best(3) if n != second]  # a child must beat what it replaces


def test_a_root_without_children_is_asked_once() -> None:
    tree = EvolvingTree(1, max_nodes=3)
    tree.fed(ROOT, 0)
    assert tree.add(ROOT, [(1, -math.inf), (2, math.nan)]) == [] and tree.frontier(2) == []
    tree.reroot([7])
    assert tree.frontier(2) == [ROOT]


def test_no_verdict_is_empty() -> None:
    with pytest.raises(InvariantError):
        grown().reroot([])
    with pytest.raises(InvariantError):
        EvolvingTree(0, max_nodes=3)


@pytest.mark.parametrize(
    "message",
    [
        DraftSync(3, (1, 2)),
        VerifyCommit(3, 2, (5,)),
        TailStream(3, 2, (TailNode(0, ROOT, 2, 9, -0.25), TailNode(1, 0, 3, 8, -1.5))),
        TailStream(3, 2, (), True),
        Candidates(3, 2, (((9, -0.5), (4, -1.5)), ((8, -0.25),))),
        Close(3),
        Close(),
        Ready((1,), 4096),
        Worked(1.5, 1.75, 3, 9),
    ],
)
def test_messages_survive_the_wire(message: object) -> None:
    assert from_line(to_line(message)) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", '["Close"]', '["Run",{}]', '["Close",{"stream":"x"}]', '["DraftSync",{"stream":1}]'],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(PayloadError):
        from_line(line)
