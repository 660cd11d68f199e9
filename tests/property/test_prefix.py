"""Both prefix indexes against a dictionary of whole prefixes; the hash chain also with the worst hash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.engine.prefix import Entry, PrefixIndex, chain_digest
from workbench.engine.radix import RadixIndex

TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=9)
NAMESPACES = st.sampled_from([b"a", b"b"])


class Index(RuleBasedStateMachine):
    """``known`` maps (namespace, all tokens up to the end of a page) to the page that holds its KV."""

    digest = staticmethod(chain_digest)
    page = 2

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[bytes, tuple[int, ...]], tuple[int, ...]] = {}
        self.next_page = 1
        self.chains: list[tuple[bytes, tuple[int, ...], Any]] = []

    @initialize()
    def fresh(self) -> None:
        self.index = self.make()

    def make(self):
        return PrefixIndex(self.page, self.digest)

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def publish(self, tokens: list[int], namespace: bytes) -> None:
        """As a sequence does: from what it found on, one page after the other."""
        chain = list(self.index.match(tokens, namespace, len(tokens)).full)
        assert [e.pages for e in chain] == self.hits(tokens, namespace, len(tokens))
        for end in range((len(chain) + 1) * self.page, len(tokens) + 1, self.page):
            pages = (self.next_page, self.next_page + 1000)
            self.next_page += 1
            parent = chain[-1] if chain else None
            entry, ours = self.index.publish(parent, tuple(tokens[end - self.page : end]), namespace, pages)
            key = (namespace, tuple(tokens[:end]))
            assert ours == (key not in self.known)
            self.known.setdefault(key, pages)
            assert entry.pages == self.known[key]
            chain.append(entry)
            self.chains.append((namespace, tuple(tokens[:end]), entry))

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=3, max_size=3))
    def go_on(self, data: st.DataObject, more: list[int]) -> None:
        """A running sequence holds on to what it published or found, evicted since or not."""
        namespace, before, parent = data.draw(st.sampled_from(self.chains))
        pages = (self.next_page, self.next_page + 1000)
        self.next_page += 1
        tokens = tuple(more[: self.page])
        entry, ours = self.index.publish(parent, tokens, namespace, pages)
        key = (namespace, before + tokens)
        assert ours == (key not in self.known)
        assert entry.pages == self.known.setdefault(key, pages)

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.integers(0, 10))
    def lookup(self, tokens: list[int], namespace: bytes, limit: int) -> None:
        found = self.index.match(tokens, namespace, limit)
        assert [e.pages for e in found.full] == self.hits(tokens, namespace, limit)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), group=st.integers(0, 1))
    def drop(self, data: st.DataObject, group: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        pages = self.known.pop(key)
        entry = self.index.drop_page(group, pages[group])
        assert entry is not None
        assert entry.pages == pages
        assert self.index.drop_page(group, pages[group]) is None

    def hits(self, tokens: list[int], namespace: bytes, limit: int) -> list[tuple[int, ...]]:
        """Pages of the leading full pages that are known, up to the first gap."""
        out = []
        for end in range(self.page, min(limit, len(tokens)) + 1, self.page):
            pages = self.known.get((namespace, tuple(tokens[:end])))
            if pages is None:
                break
            out.append(pages)
        return out

    @invariant()
    def counts(self) -> None:
        assert len(self.index) == len(self.known)


class Colliding(Index):
    """Every page has the same digest: only tokens and ancestry tell them apart."""

    digest = staticmethod(lambda parent, tokens: b"same")


class Radix(Index):
    """The tree: the same full pages, and of the next page as many rows as any known one shares."""

    def make(self):
        return RadixIndex(self.page)

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.integers(0, 10))
    def lookup(self, tokens: list[int], namespace: bytes, limit: int) -> None:
        found = self.index.match(tokens, namespace, limit)
        full = self.hits(tokens, namespace, limit)
        assert [e.pages for e in found.full] == full
        wanted = tuple(tokens[:limit])
        begin = len(full) * self.page
        best: dict[tuple[int, ...], int] = {}
        for (space, known), pages in self.known.items():
            if space == namespace and len(known) == begin + self.page:
                same = 0
                while same < min(len(wanted), len(known)) and wanted[same] == known[same]:
                    same += 1
                best[pages] = same - begin
        rows = max([0, *best.values()])
        assert found.rows == rows
        assert (found.partial is None) == (rows == 0)
        if found.partial is not None:
            assert best[found.partial.pages] == rows

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.known.clear()

    @invariant()
    def tree(self) -> None:
        """Labels are not empty, children begin where their parent ends, every end leads to a page."""
        for node in self.index.nodes():
            assert node.label or node.parent is None
            assert node.parent is None or node.start == node.parent.end
            assert all(child.label[0] == first for first, child in node.children.items())
            assert all(
                node.start < (n + 1) * self.page <= node.end and p.node is node for n, p in node.pages.items()
            )
            if node.parent is not None and not node.children:
                assert (max(node.pages) + 1) * self.page == node.end
            if node.parent is not None:
                assert len(node.children) != 1


class LongPages(Radix):
    """Prompts also leave the tree two tokens into a page."""

    page = 3


TestIndex = Index.TestCase
TestRadixIndex = Radix.TestCase
TestLongPages = LongPages.TestCase
TestCollidingIndex = Colliding.TestCase


def test_a_republished_parent_gives_its_children_back() -> None:
    index = PrefixIndex(1)
    root, _ = index.publish(None, (1,), b"", (1,))
    index.publish(root, (2,), b"", (2,))
    index.drop_page(0, 1)
    assert index.lookup([1, 2], b"", 2) == []
    index.publish(None, (1,), b"", (9,))
    assert [e.pages for e in index.lookup([1, 2], b"", 2)] == [(9,), (2,)]


@pytest.mark.parametrize("other", [(1, 2, 3), (2, 1), (1,)])
def test_digests_tell_tokens_and_parents_apart(other: tuple[int, ...]) -> None:
    assert chain_digest(b"p", (1, 2)) != chain_digest(b"p", other)
    assert chain_digest(b"p", (1, 2)) != chain_digest(b"q", (1, 2))
    assert isinstance(PrefixIndex(2).publish(None, (1, 2), b"", (1,))[0], Entry)
