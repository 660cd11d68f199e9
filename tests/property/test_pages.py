"""The page pool against a model of it: conservation, least recently used eviction, double frees refused."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workbench.engine.pages import NULL_PAGE, PagePool
from workbench.spec.errors import InvariantError


class Pool(RuleBasedStateMachine):
    """``refs`` counts owners, ``order`` holds cached pages, the one to be evicted first in front."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = PagePool(7, 4, self.evicted.append)
        self.refs = dict.fromkeys(range(1, 8), 0)
        self.published: set[int] = set()
        self.order: list[int] = []
        self.held: list[list[int]] = []

    def clean(self) -> list[int]:
        return sorted(p for p, n in self.refs.items() if n == 0 and p not in self.order)

    def take(self, page: int) -> None:
        if page in self.order:
            self.order.remove(page)
            self.published.discard(page)
        self.refs[page] = 1

    @rule(n=st.integers(0, 8))
    def allocate(self, n: int) -> None:
        expected = [*self.clean(), *self.order]
        evicted = self.order[: max(0, n - len(self.clean()))]
        self.evicted.clear()
        got = self.pool.allocate(n)
        if n > len(expected):
            assert got is None
            assert self.evicted == []
            return
        assert got == expected[:n]  # clean ones first, lowest id first, then the least recently used
        assert self.evicted == evicted
        for page in got:
            self.take(page)
        self.held.append(got)

    @rule(n=st.integers(1, 7))
    def allocate_run(self, n: int) -> None:
        free = {p for p, r in self.refs.items() if r == 0}
        starts = [s for s in range(1, 9 - n) if set(range(s, s + n)) <= free]
        self.evicted.clear()
        got = self.pool.allocate_run(n)
        if not starts:
            assert got is None
            assert self.evicted == []
            return
        assert got == list(range(starts[0], starts[0] + n))
        assert sorted(self.evicted) == sorted(set(got) & set(self.order))
        for page in got:
            self.take(page)
        self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = list(data.draw(st.sampled_from(self.held)))
        self.pool.share(pages)
        for page in pages:
            self.refs[page] += 1
        self.held.append(pages)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def share_cached(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.order))
        self.pool.share([page])
        self.order.remove(page)
        self.refs[page] = 1
        self.held.append([page])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(pages)
        for page in reversed(pages):  # the tail of a prefix goes before its head
            self.refs[page] -= 1
            if self.refs[page] == 0 and page in self.published:
                self.order.append(page)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({p for pages in self.held for p in pages})))
        self.pool.publish(page)
        self.published.add(page)

    @rule(n=st.integers(1, 3))
    def a_prompt_comes_and_goes(self, n: int) -> None:
        before = len(self.held)
        self.allocate(n)
        if len(self.held) == before:
            return
        pages = self.held.pop()
        for page in pages:
            self.pool.publish(page)
        self.published.update(pages)
        self.pool.release(pages)
        for page in reversed(pages):
            self.refs[page] -= 1
            self.order.append(page)

    @rule(page=st.integers(1, 7))
    def unpublish(self, page: int) -> None:
        self.pool.unpublish(page)
        self.published.discard(page)
        if page in self.order:
            self.order.remove(page)

    @rule()
    def what_nobody_holds_cannot_be_released_or_shared(self) -> None:
        for page in self.clean():
            with pytest.raises(InvariantError, match="released"):
                self.pool.release([page])
            with pytest.raises(InvariantError, match="shared"):
                self.pool.share([page])
        for page in self.order:
            with pytest.raises(InvariantError):
                self.pool.release([page])

    @rule()
    def the_null_page_is_nobodys(self) -> None:
        self.pool.release([NULL_PAGE, NULL_PAGE])
        assert self.pool.refs[NULL_PAGE] == 0

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        assert self.pool.refs[1:] == [self.refs[p] for p in range(1, 8)]
        assert list(self.pool._cached) == self.order
        assert self.pool.cached == len(self.order)
        assert self.pool.used == sum(r > 0 for r in self.refs.values())
        assert self.pool.free + self.pool.used == 7


TestPool = Pool.TestCase


@pytest.mark.parametrize("damage", ["twice", "lost", "negative", "unpublished"])
def test_check_finds_damaged_books(damage: str) -> None:
    pool = PagePool(4, 4)
    (page,) = pool.allocate(1) or []
    pool.publish(page)
    pool.release([page])
    pool.check()
    if damage == "twice":
        pool._clean.append(page)
    elif damage == "lost":
        del pool._cached[page]
    elif damage == "negative":
        pool.refs[2] = -1
    else:
        pool._published.clear()
    with pytest.raises(InvariantError):
        pool.check()
