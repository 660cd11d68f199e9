"""The prefix index against a dictionary of whole prefixes, with a good hash and with the worst one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.engine.prefix import Entry, PrefixIndex, chain_digest

PAGE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=0, max_size=9)
NAMESPACES = st.sampled_from([b"a", b"b"])


class Index(RuleBasedStateMachine):
    """``known`` maps (namespace, all tokens up to the end of a page) to the page that holds its KV."""

    digest = staticmethod(chain_digest)

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[bytes, tuple[int, ...]], tuple[int, ...]] = {}
        self.next_page = 1

    @initialize()
    def fresh(self) -> None:
        self.index = PrefixIndex(PAGE, self.digest)

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def publish(self, tokens: list[int], namespace: bytes) -> None:
        """As a sequence does: from what it found on, one page after the other."""
        chain = self.index.lookup(tokens, namespace, len(tokens))
        assert [e.pages for e in chain] == self.hits(tokens, namespace, len(tokens))
        for end in range((len(chain) + 1) * PAGE, len(tokens) + 1, PAGE):
            pages = (self.next_page, self.next_page + 1000)
            self.next_page += 1
            parent = chain[-1] if chain else None
            entry, ours = self.index.publish(parent, tuple(tokens[end - PAGE : end]), namespace, pages)
            key = (namespace, tuple(tokens[:end]))
            assert ours == (key not in self.known)
            self.known.setdefault(key, pages)
            assert entry.pages == self.known[key]
            chain.append(entry)

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.integers(0, 10))
    def lookup(self, tokens: list[int], namespace: bytes, limit: int) -> None:
        found = self.index.lookup(tokens, namespace, limit)
        assert [e.pages for e in found] == self.hits(tokens, namespace, limit)

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
        for end in range(PAGE, min(limit, len(tokens)) + 1, PAGE):
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


TestIndex = Index.TestCase
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
