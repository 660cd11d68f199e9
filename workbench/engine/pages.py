"""Page ids of one pool: reference counts, free pages, and the LRU of cached pages.

KV groups whose pages are of one size draw from one pool; a page is one group's, its *owner's*, at a time.

The pool owns no bytes. Page 0 is the null page: a placeholder that is never allocated, never
freed and never counted. A page with no reference is either *clean* or *cached* (a prefix index
can still find its content); cached pages are handed out last, least recently used first.
Bookkeeping after vLLM's block pool (Kwon et al. 2023, §4; prefix caching design notes).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from workbench.spec.errors import InvariantError

NULL_PAGE = 0


class PagePool:
    """``pages`` usable pages with ids 1 .. ``pages``."""

    def __init__(self, pages: int, page_size: int, on_evict: Callable[[int], None] | None = None) -> None:
        self.pages = pages
        self.page_size = page_size
        self.refs = [0] * (pages + 1)
        self.owners = [0] * (pages + 1)  # who took the page last: the group of its content, also while cached
        self.on_evict = on_evict
        self._clean = list(range(1, pages + 1))  # a heap: low ids first keeps the live range dense
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._published: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that an allocation may take, cached ones included."""
        return len(self._clean) + len(self._cached)

    @property
    def cached(self) -> int:
        """Unreferenced pages whose content can still be found."""
        return len(self._cached)

    def cached_pages(self, owner: int | None = None) -> list[int]:
        """Their ids, the one to be evicted first in front; of one owner, or of all."""
        return [p for p in self._cached if owner is None or self.owners[p] == owner]

    def taken(self) -> list[int]:
        """Ids of the pages that some sequence refers to, and of the cached ones."""
        return [*(p for p, n in enumerate(self.refs) if n), *self._cached]

    def used_by(self, owner: int) -> int:
        """Pages of one owner that some sequence refers to."""
        return sum(n > 0 and self.owners[p] == owner for p, n in enumerate(self.refs))

    @property
    def used(self) -> int:
        """Pages some sequence refers to."""
        return self.pages - self.free

    def allocate(self, n: int, owner: int = 0) -> list[int] | None:
        """Take ``n`` pages with one reference each, or None, changing nothing, if there are not enough."""
        if n > self.free:
            return None
        return [self._take(owner) for _ in range(n)]

    def allocate_run(self, n: int, owner: int = 0) -> list[int] | None:
        """Take ``n`` consecutive pages (a contiguous reservation), or None if no such run is free."""
        run: list[int] = []
        for page in sorted([*self._clean, *self._cached]):
            if run and page != run[-1] + 1:
                run = []
            run.append(page)
            if len(run) == n:
                break
        if len(run) < n:
            return None
        for page in run:
            if page in self._cached:
                self._evict(page)
        taken = set(run)
        self._clean = [p for p in self._clean if p not in taken]
        heapq.heapify(self._clean)
        for page in run:
            self.refs[page] = 1
            self.owners[page] = owner
        return run

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each page; a cached page becomes used again."""
        for page in pages:
            if page == NULL_PAGE:
                continue
            if self.refs[page] == 0:
                if page not in self._cached:
                    raise InvariantError(f"page {page} is shared but nobody holds it and it is not cached.")
                del self._cached[page]
            self.refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page, last page first, so that tails are evicted before heads."""
        for page in reversed(list(pages)):
            if page == NULL_PAGE:
                continue
            if self.refs[page] <= 0:
                raise InvariantError(f"page {page} is released but nobody holds it.")
            self.refs[page] -= 1
            if self.refs[page] == 0:
                if page in self._published:
                    self._cached[page] = None
                else:
                    heapq.heappush(self._clean, page)

    def publish(self, page: int) -> None:
        """The page's content can be found by an index: keep it findable once it is unreferenced."""
        self._published.add(page)

    def unpublish(self, page: int) -> None:
        """The index dropped the page; its references are untouched."""
        self._published.discard(page)
        if page in self._cached:
            del self._cached[page]
            heapq.heappush(self._clean, page)

    def unpublish_all(self) -> None:
        """The index dropped every page: what was cached is clean."""
        for page in list(self._published):
            self.unpublish(page)

    def check(self) -> None:
        """Raise :class:`InvariantError` unless every page is exactly one of clean, cached, used."""
        clean, cached = set(self._clean), set(self._cached)
        used = {p for p in range(1, self.pages + 1) if self.refs[p] > 0}
        if len(clean) != len(self._clean) or clean & cached or clean & used or cached & used:
            raise InvariantError("a page is in two states at once.")
        if len(clean) + len(cached) + len(used) != self.pages:
            raise InvariantError("a page is in no state at all.")
        if min(self.refs) < 0 or not cached <= self._published or clean & self._published:
            raise InvariantError("reference counts or published pages are inconsistent.")

    def _take(self, owner: int) -> int:
        if self._clean:
            page = heapq.heappop(self._clean)
        else:
            page = next(iter(self._cached))
            self._evict(page)
        self.refs[page] = 1
        self.owners[page] = owner
        return page

    def _evict(self, page: int) -> None:
        """Forget a cached page's content; the caller takes the page."""
        del self._cached[page]
        self._published.discard(page)
        if self.on_evict is not None:
            self.on_evict(page)
