"""The KV cache of an engine: page tables, prefix sharing, copy-on-write, and the bytes behind them.

Ownership: a sequence owns one reference on each page of its tables; the prefix index owns none.
An allocation either succeeds for every KV group or changes nothing. What a step wrote becomes
final in :meth:`commit`: only then are full pages encoded and published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workbench.engine.cold_pages import ColdPages
from workbench.engine.compaction import Rows, gather_rows, put_rows
from workbench.engine.kv_bytes import kv_bytes
from workbench.engine.page_bytes import PageBytes
from workbench.engine.page_ends import PageEnds
from workbench.engine.pages import NULL_PAGE, PagePool
from workbench.engine.prefix import Index, Match
from workbench.engine.sequence import Sequence
from workbench.engine.store import PageStore
from workbench.engine.windows import Windows


class KVCache:
    """Pools, stores and the prefix index; ``pools[g]`` and ``stores[g]`` are those of KV group g.

    Groups whose stores lie on the same storages share a pool of ``pages`` pages for each of them: what one
    gives back serves the others.
    ``reserve`` > 0 means contiguous caches: each sequence gets one run of that many slots at
    admission (the layout before paging); 0 means pages on demand.
    ``windows`` are the groups' attention windows (None: all keys). Pages that lie wholly behind a window are
    given back as the sequence grows; the null page takes their place in its table.
    ``prompts_only``: what a sequence generates is no prefix for others, because attention computed it
    otherwise than a prompt.
    ``cold``, if given later, takes the cached pages that a pool has to give up.
    ``ends``: what a drafter reads behind published pages.
    ``namespace`` is the part of every cache key that does not depend on the request (law 4).
    """

    def __init__(
        self,
        stores: Seq[PageStore],
        *,
        pages: int,
        page_size: int,
        namespace: bytes = b"",
        index: Index | None = None,
        reserve: int = 0,
        windows: Seq[int | None] = (),
        prompts_only: bool = False,
    ) -> None:
        self.stores = list(stores)
        self.page_size = page_size
        self.pages = pages
        self.namespace = namespace
        self.index = index
        self.reserve = reserve
        self.prompts_only = prompts_only
        self.windows = Windows([] if reserve else windows, len(self.stores), page_size)
        self.cold: ColdPages | None = None
        self.ends = PageEnds()
        self.copies = 0
        made: dict[PageBytes, PagePool] = {}
        for held in (store.held for store in self.stores):
            if held not in made:
                made[held] = PagePool(held.geometry.pages, page_size)
                made[held].on_evict = self._evictor(made[held])
        self.pools = [made[store.held] for store in self.stores]
        self.each_pool = list(made.values())
        self._groups = range(len(self.stores))

    # -- capacity -----------------------------------------------------------------------------------

    def pages_for(self, slots: int) -> int:
        """Pages that hold so many slots (a whole reservation when caches are contiguous)."""
        return -(-(max(slots, self.reserve) if self.reserve else slots) // self.page_size)

    def fits(self, slots: int, block: int | None = None) -> bool:
        """Whether a sequence of so many slots fits when alone, computed ``block`` tokens at a time."""
        most = [min(slots, self.windows.reach(g, slots, 0, block) + self.page_size) for g in self._groups]
        return not self._short([self.pages_for(n) for n in most], [pool.pages for pool in self.each_pool])

    def match(self, seq: Sequence) -> Match:
        """What the index has of a sequence, at least one token left out: its logits must be computed."""
        if self.index is None or seq.params.prompt_logprobs is not None:
            return Match([])
        return self.windows.whole(self.index.match(seq.tokens, self._namespace(seq), self._limit(seq)))

    def admit(self, seq: Sequence, slots: int, *, block: int | None = None, heads: bool = True) -> bool:
        """Give a sequence pages for ``slots`` slots, reusing cached ones; False if it must wait.

        When it will be computed in blocks of at most ``block`` tokens, groups with a window get no more pages
        than they will need at a time.
        A page of which only the head is wanted is copied, since its rows behind are another prompt's; when
        there is no room for both (or not ``heads``), it is done without.
        """
        full, partial, rows = self.match(seq)
        found = self._cold_run(seq, len(full))
        again = self.ends.again(rows)
        if partial is not None and (
            found or not heads or rows == again or not all(store.copies_rows for store in self.stores)
        ):
            partial, rows, again = None, 0, 0
        held = [*full, partial] if partial is not None else full
        at = len(full) * self.page_size + rows - again
        seen = [self.windows.behind(g, at) for g in self._groups]
        shared = [[NULL_PAGE] * n + [e.pages[g] for e in held[n:]] for g, n in enumerate(seen)]
        if again and any(NULL_PAGE in pages[n:] for pages, n in zip(shared, seen, strict=True)):
            return self.admit(
                seq, slots, block=block, heads=False
            )  # a window sees a page more, which is lost
        for pool, pages in zip(self.pools, shared, strict=True):
            pool.share(pages)
        count = [self.pages_for(self.windows.reach(g, slots, at, block)) - len(full) for g in self._groups]
        fresh = self._allocate(count, contiguous=bool(self.reserve))
        if fresh is None:
            for pool, pages in zip(self.pools, shared, strict=True):
                pool.release(pages)
            return partial is not None and self.admit(seq, slots, block=block, heads=False)
        if partial is not None:
            for pool, store, pages, own in zip(self.pools, self.stores, shared, fresh, strict=True):
                source = pages.pop()
                store.copy(source, own[0], rows)
                pool.release([source])
        seq.tables = [a + b for a, b in zip(shared, fresh, strict=True)]
        seq.chain = list(full)
        seq.computed, seq.drafted = at, at + again
        seq.ends = self.ends.behind(full)
        if found:
            self._thaw(seq, found)
        if not seq.preemptions:  # a resumed sequence finds its own pages again: those saved nothing
            seq.cached_tokens = seq.computed
        return True

    def extend(self, seq: Sequence, slots: int) -> bool:
        """Make room for ``slots`` tokens in all, and make the slots behind ``computed`` writable.

        A page that is shared and about to be written is copied first (copy-on-write).
        """
        need: list[int] = []
        shared: list[list[int]] = []
        for g, (table, pool) in enumerate(zip(seq.tables, self.pools, strict=True)):
            used = seq.used(g)
            wanted = slots - seq.computed + used
            first, last = used // self.page_size, -(-wanted // self.page_size)
            shared.append([i for i in range(first, min(last, len(table))) if pool.refs[table[i]] > 1])
            need.append(max(self.pages_for(wanted) - len(table), 0) + len(shared[-1]))
        if not any(need):
            return True
        fresh = self._allocate(need)
        if fresh is None:
            return False
        for table, pages, pool, store, copied in zip(
            seq.tables, fresh, self.pools, self.stores, shared, strict=True
        ):
            for i in copied:
                page = pages.pop()
                store.copy(table[i], page)
                pool.release([table[i]])
                table[i] = page
            table.extend(pages)
        self.copies += len(shared[0])
        return True

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Share the parent's pages with ``child`` (contiguous caches are copied); False if it must wait."""
        if not parent.tables:
            return False
        child.chain, child.drafted = list(parent.chain), parent.drafted
        child.computed = child.cached_tokens = parent.computed
        child.dropped, child.shift = list(parent.dropped), parent.shift
        child.kept, child.selected = dict(parent.kept), parent.selected
        child.selection = parent.selection.fork() if parent.selection is not None else None
        if not self.reserve:
            for pool, table in zip(self.pools, parent.tables, strict=True):
                pool.share(table)
            child.tables = [list(t) for t in parent.tables]
            return True
        fresh = self._allocate([len(t) for t in parent.tables], contiguous=True)
        if fresh is None:
            return False
        used = -(-parent.computed // self.page_size)
        for store, old, new in zip(self.stores, parent.tables, fresh, strict=True):
            for a, b in zip(old[:used], new, strict=False):
                store.copy(a, b)
        child.tables = fresh
        return True

    # -- commit ----------------------------------------------------------------------------------------

    def commit(self, seq: Sequence, computed: int) -> None:
        """The KV of the first ``computed`` tokens is final: encode and publish the pages that became full."""
        before = [seq.used(g) // self.page_size for g in range(len(self.stores))]
        seq.computed = computed
        for g, (store, table, first) in enumerate(zip(self.stores, seq.tables, before, strict=True)):
            store.fill(table[first : seq.used(g) // self.page_size])
        if self.index is not None and not seq.dropped and computed // self.page_size > before[0]:
            self._publish(self.index, seq, computed // self.page_size)
        seq.ends = {}
        self._drop_behind_windows(seq)

    def adopt(self, seq: Sequence, computed: int, fill: Callable[[], None]) -> None:
        """``fill`` writes the KV of the first ``computed`` tokens (whole pages) into the fresh pages of a
        sequence; they are then published. If it raises, nobody can find what it wrote.
        """
        seq.computed = computed
        self._drop_behind_windows(seq)
        fill()
        if self.index is not None:
            self._publish(self.index, seq, computed // self.page_size)

    def _publish(self, index: Index, seq: Sequence, last: int) -> None:
        """Make the first ``last`` pages of a sequence findable."""
        if self.prompts_only:
            last = min(last, seq.prompt_len // self.page_size)
        namespace = self._namespace(seq)
        for i in range(len(seq.chain), last):
            tokens = tuple(seq.tokens[i * self.page_size : (i + 1) * self.page_size])
            pages = tuple(t[i] for t in seq.tables)
            entry, ours = index.publish(seq.chain[-1] if seq.chain else None, tokens, namespace, pages)
            for g, (pool, page) in enumerate(zip(self.pools, pages, strict=True)):
                if ours or index.restore(entry, g, page):
                    pool.publish(page)
            self.ends.keep(entry, seq.ends.get(i))
            seq.chain.append(entry)

    def _drop_behind_windows(self, seq: Sequence) -> None:
        """Give back the pages that no later token of the sequence sees."""
        for g, (pool, store, table) in enumerate(zip(self.pools, self.stores, seq.tables, strict=True)):
            behind = self.windows.behind(g, seq.computed)
            if behind and table[behind - 1] != NULL_PAGE:
                pages = [p for p in table[:behind] if p != NULL_PAGE]
                table[:behind] = [NULL_PAGE] * behind
                pool.release(pages[::-1])  # the first is evicted first: longer prefixes can do without
                store.release([p for p in pages if pool.refs[p] == 0])
                if seq.pending > 1:  # a prompt that was not given all its pages: they serve it further on
                    missing = max(self.pages_for(len(seq.tokens)) - len(table), 0)
                    fresh = pool.allocate(min(missing, len(pages)), g) or []
                    store.reset(fresh)
                    table.extend(fresh)

    def move(self, seq: Sequence, source: Seq[int], target: Seq[int]) -> None:
        """Move rows at slot indices ``source`` of the sequence to ``target``: compacts an accepted path."""
        for g, (store, table) in enumerate(zip(self.stores, seq.tables, strict=True)):
            gone = seq.computed - seq.used(g)
            store.move(*(self._slots(table, [i - gone for i in at]) for at in (source, target)))

    def compact(
        self, seq: Sequence, keep: Mapping[int, Tensor], turn: Callable[[Rows, Tensor], None] | None = None
    ) -> bool:
        """Keep the slots ``keep[g]`` (int64 [layers, heads, k], ascending) of KV groups, in private pages.

        ``turn(rows, keep)`` may change rows on their way. False when shared pages leave no room for them: the
        sequence has then lost its pages and is to be released.
        """
        moved: dict[int, tuple[Rows, Tensor]] = {}
        counts = [0] * len(self.pools)
        for g, slots in keep.items():
            moved[g] = gather_rows(self.stores[g], seq.tables[g][: self.pages_for(seq.used(g))], slots)
            if turn is not None:
                turn(moved[g][0], slots)
            counts[g] = self.pages_for(slots.shape[-1])
        for g in keep:
            self.pools[g].release(seq.tables[g])
            self.stores[g].release([p for p in seq.tables[g] if self.pools[g].refs[p] == 0])
            seq.tables[g] = []
        fresh = self._allocate(counts)
        if fresh is None:
            return False
        dropped = list(seq.dropped or [0] * len(self.pools))
        for g, slots in keep.items():
            put_rows(self.stores[g], fresh[g], *moved[g])
            seq.tables[g] = fresh[g]
            dropped[g] += seq.used(g) - slots.shape[-1]
        seq.dropped = dropped
        return True

    def release(self, seq: Sequence) -> None:
        """The sequence ends, is aborted or preempted: drop its references."""
        for pool, store, table in zip(self.pools, self.stores, seq.tables, strict=True):
            pool.release(table)
            store.release([p for p in table if p != NULL_PAGE and pool.refs[p] == 0])
        seq.tables, seq.chain, seq.computed, seq.drafted = [], [], 0, 0
        seq.dropped, seq.shift, seq.selection = [], 0, None
        seq.kept, seq.selected, seq.ends = {}, 0, {}

    def forget_prefixes(self) -> None:
        """Drop every cached page, for a benchmark that must start cold."""
        for pool in self.each_pool:
            pool.unpublish_all()
        if self.index is not None:
            self.index.clear()
        self.ends.clear()
        if self.cold is not None:
            self.cold.clear()

    def close(self) -> None:
        """Nobody uses the cache any more: leave no files behind. Closing twice is fine."""
        if self.cold is not None:
            self.cold.tier.close()

    # -- books -------------------------------------------------------------------------------------------

    def nbytes(self, running: Seq[Sequence]) -> dict[str, int]:
        """Bytes by category, adding up to the storages held (:func:`workbench.engine.kv_bytes.kv_bytes`)."""
        cold = self.cold.tier.nbytes() if self.cold is not None else {}
        out = {**kv_bytes(self.pools, self.stores, running), **cold}
        out["kv_meta"] += self.ends.nbytes()
        return out

    def check(self) -> None:
        """Raise :class:`InvariantError` unless the books of every pool balance."""
        for pool in self.each_pool:
            pool.check()

    # -- inside ---------------------------------------------------------------------------------------------

    def _allocate(self, counts: Seq[int], *, contiguous: bool = False) -> list[list[int]] | None:
        """So many fresh zeroed pages of each group, or None and nothing changed."""
        if self._short(counts, [pool.free for pool in self.each_pool]):
            return None
        taken: list[list[int]] = []
        for g, (pool, n) in enumerate(zip(self.pools, counts, strict=True)):
            pages = pool.allocate_run(n, g) if contiguous and n else pool.allocate(n, g)
            if pages is None:
                for other, given in zip(self.pools, taken, strict=False):
                    other.release(given)
                return None
            taken.append(pages)
        for store, pages in zip(self.stores, taken, strict=True):
            store.reset(pages)
        return taken

    def _short(self, counts: Seq[int], there: Seq[int]) -> bool:
        """Whether ``there`` pages of each pool are fewer than what its groups need together."""
        need = dict.fromkeys(self.each_pool, 0)
        for pool, n in zip(self.pools, counts, strict=True):
            need[pool] += n
        return any(n > have for n, have in zip(need.values(), there, strict=True))

    def _limit(self, seq: Sequence) -> int:
        """Tokens of a sequence that may be found: the logits of one at least must be computed."""
        limit = len(seq.tokens) - 1
        if seq.shareable is not None:
            limit = min(limit, seq.shareable)
        if self.prompts_only:
            limit = min(limit, seq.prompt_len)
        return limit

    def _cold_run(self, seq: Sequence, known: int) -> list[int]:
        """What the cold tier has behind the ``known`` pages found, at least one token left out."""
        if self.cold is None or self.index is None or seq.params.prompt_logprobs is not None:
            return []
        return self.cold.run(self._namespace(seq), seq.tokens, known, self._limit(seq))

    def _thaw(self, seq: Sequence, found: Seq[int]) -> None:
        """Fill fresh pages of an admitted sequence with what the cold tier has, and publish them."""
        if self.cold is None or self.index is None:
            return
        known = len(seq.chain)
        end = known + self.cold.thaw(found, seq.tables, known)
        if end > known:
            seq.computed = end * self.page_size
            self._publish(self.index, seq, end)
            self.cold.note(
                e for i, e in enumerate(seq.chain) if i >= known and e.pages[0] == seq.tables[0][i]
            )

    def _evictor(self, pool: PagePool) -> Callable[[int], None]:
        """What happens when a pool takes a cached page: its entry goes, unless only a window lost a page."""

        def evict(page: int) -> None:
            if self.index is None:
                return
            group = pool.owners[page]
            if self.windows.may_lose(group):
                self.index.lose_page(group, page)
                return
            entry = self.index.drop_page(group, page)
            if entry is None:
                return
            self.ends.lose(entry)
            if self.cold is not None:
                self.cold.give_up(entry)
            for g, p in enumerate(entry.pages):
                if g != group and p != NULL_PAGE:
                    self.pools[g].unpublish(p)

        return evict

    def _namespace(self, seq: Sequence) -> bytes:
        return self.namespace + seq.request.salt.encode()

    def _slots(self, table: Seq[int], index: Seq[int]) -> torch.Tensor:
        size = self.page_size
        return torch.tensor([table[i // size] * size + i % size for i in index], dtype=torch.int64)
