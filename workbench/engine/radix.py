"""Radix-tree prefix index: hits are exact to the token, not only to the page (SGLang, arXiv 2312.07104, §3).

A path from the root spells a prompt; nodes split where prompts diverge. A published page hangs on the node
that holds its last token. Where a prompt leaves the tree inside a page, the rows before that point are the
same in every page below it, so one such page can be copied and its head used. Pages in use are never
dropped (their references are the lock); the pool evicts the least recently used first, and since a prompt's
pages are released last to first, leaves go before what they hang on. Trees of different namespaces (law 4)
share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from workbench.engine.prefix import Match, PageNames


@dataclass(eq=False, slots=True)
class RadixPage:
    """One published page: its tokens, the page before it, its id per KV group, the node of its last token.

    ``node`` is None once the page was dropped; sequences may still hold it as a parent.
    """

    tokens: tuple[int, ...]
    parent: RadixPage | None
    namespace: bytes
    pages: tuple[int, ...]
    number: int
    node: Node | None = None


@dataclass(eq=False, slots=True)
class Node:
    """An edge and its end: ``label`` are the tokens from position ``start`` on."""

    label: tuple[int, ...]
    start: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    pages: dict[int, RadixPage] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Position behind the last token of the label."""
        return self.start + len(self.label)


class RadixIndex(PageNames[RadixPage]):
    """Finds the longest published beginning of a prompt, to the token."""

    def __init__(self, page_size: int, *, longest_first: bool = True) -> None:
        super().__init__()
        self.page_size = page_size
        self.longest_first = longest_first
        self._roots: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(set(map(id, self._by_page.values())))

    def match(self, tokens: Sequence[int], namespace: bytes, limit: int) -> Match:
        """Leading full pages and the head of one more, at most ``limit`` tokens in all."""
        root = self._roots.get(namespace)
        if root is None:
            return Match([])
        wanted = tuple(tokens[: max(limit, 0)])
        node, matched = _walk(root, 0, wanted)
        path = list(_upwards(node))
        size, found = self.page_size, {}
        for step in path:
            found.update({n: p for n, p in step.pages.items() if (n + 1) * size <= matched})
        full: list[RadixPage] = []
        while len(full) in found:
            full.append(found[len(full)])
        number = len(full)
        for step in path:  # the deepest shared point first
            rows = min(matched, step.end) - number * size
            if not 0 < rows < size:
                continue
            page = _below(step, number, size)
            if page is not None:
                return Match(full, page, rows)
        return Match(full)

    def publish(
        self, parent: RadixPage | None, tokens: tuple[int, ...], namespace: bytes, pages: tuple[int, ...]
    ) -> tuple[RadixPage, bool]:
        """Make a full page findable; returns its entry and whether ``pages`` are the ones it names."""
        number = 0 if parent is None else parent.number + 1
        if parent is not None and parent.node is not None:
            node, offset, wanted = parent.node, number * self.page_size, tokens
        else:
            node = self._roots.setdefault(namespace, Node((), 0, None))
            offset, wanted = 0, _spelled(parent) + tokens
        node, reached = _walk(node, offset, wanted)
        missing = wanted[reached - offset :]
        if missing:
            node = self._grow(node, reached, missing)
        known = node.pages.get(number)
        if known is not None:
            return known, known.pages == pages
        entry = RadixPage(tokens, parent, namespace, pages, number, node)
        node.pages[number] = entry
        self._name(entry)
        return entry, True

    def drop_page(self, group: int, page: int) -> RadixPage | None:
        """Forget the entry that names ``page`` of KV group ``group``; pages keep their references."""
        entry = self._by_page.get((group, page))
        if entry is None or entry.node is None:
            return None
        self._unname(entry)
        node, entry.node = entry.node, None
        del node.pages[entry.number]
        self._prune(node)
        root = self._roots.get(entry.namespace)
        if root is not None and not root.children:  # salts may be as many as requests
            del self._roots[entry.namespace]
        return entry

    def _knows(self, entry: RadixPage) -> bool:
        return entry.node is not None

    def clear(self) -> None:
        """Forget every entry; pages keep their references."""
        for entry in self._by_page.values():
            entry.node = None
        self._by_page.clear()
        self._roots.clear()

    def nodes(self) -> Iterator[Node]:
        """Every node of every tree, roots included."""
        left = list(self._roots.values())
        while left:
            node = left.pop()
            yield node
            left.extend(node.children.values())

    def _grow(self, node: Node, at: int, tokens: tuple[int, ...]) -> Node:
        """Continue the tree behind position ``at`` of ``node`` with ``tokens``; returns their node."""
        if at < node.end:
            node = _split(node, at)
        if node.parent is not None and not node.children:
            node.label += tokens
            return node
        child = Node(tokens, at, node)
        node.children[tokens[0]] = child
        return child

    def _prune(self, node: Node) -> None:
        """Cut off tokens that lead to no page any more, and join what was split without need."""
        while node.parent is not None and not node.children:
            end = max(((n + 1) * self.page_size for n in node.pages), default=node.start)
            if end > node.start:
                node.label = node.label[: end - node.start]
                return
            del node.parent.children[node.label[0]]
            node = node.parent
        if node.parent is not None and len(node.children) == 1:
            _join(node)


def _walk(node: Node, at: int, tokens: tuple[int, ...]) -> tuple[Node, int]:
    """Follow ``tokens`` from position ``at`` of ``node``; the node and position where they leave the tree."""
    i = 0
    while i < len(tokens):
        if at == node.end:
            child = node.children.get(tokens[i])
            if child is None:
                break
            node = child
        label, offset = node.label, at - node.start
        room = min(len(label) - offset, len(tokens) - i)
        if label[offset : offset + room] == tokens[i : i + room]:
            n = room
        else:
            pairs = zip(label[offset:], tokens[i:], strict=False)
            n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        i, at = i + n, at + n
        if at < node.end:
            break
    return node, at


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _below(node: Node, number: int, size: int) -> RadixPage | None:
    """Any page of that number on the node or under it."""
    left = [node]
    while left:
        here = left.pop()
        if number in here.pages:
            return here.pages[number]
        if here.end < (number + 1) * size:
            left.extend(here.children.values())
    return None


def _spelled(page: RadixPage | None) -> tuple[int, ...]:
    """All tokens up to the end of a page."""
    parts = []
    while page is not None:
        parts.append(page.tokens)
        page = page.parent
    return tuple(t for part in reversed(parts) for t in part)


def _split(node: Node, at: int) -> Node:
    """Divide a node at a position inside its label; returns the upper part, ``node`` stays the lower one."""
    cut = at - node.start
    upper = Node(node.label[:cut], node.start, node.parent, {node.label[cut]: node})
    if node.parent is not None:
        node.parent.children[node.label[0]] = upper
    size = 0
    for number, page in list(node.pages.items()):
        size = size or len(page.tokens)
        if (number + 1) * size <= at:
            upper.pages[number] = node.pages.pop(number)
            page.node = upper
    node.label, node.start, node.parent = node.label[cut:], at, upper
    return upper


def _join(node: Node) -> None:
    """Join a node with its only child; the child stays."""
    (child,) = node.children.values()
    child.label, child.start, child.parent = node.label + child.label, node.start, node.parent
    for number, page in node.pages.items():
        child.pages[number] = page
        page.node = child
    if node.parent is not None:
        node.parent.children[child.label[0]] = child
