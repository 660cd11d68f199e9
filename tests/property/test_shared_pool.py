"""Random sequences in one pool for three KV groups, two of them with windows: books and rows stay right."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.engine.kv import KVCache
from workbench.engine.pages import NULL_PAGE
from workbench.engine.params import SamplingParams
from workbench.engine.prefix import PrefixIndex
from workbench.engine.radix import RadixIndex
from workbench.engine.seams import PageGeometry
from workbench.engine.sequence import Request, Sequence
from workbench.engine.store import PageStore
from workbench.kv.kivi import KiviCodec
from workbench.kv.plain import PlainCodec

WINDOWS = (None, 8, 14)
LAYERS = (2, 2, 1)


def row(group: int, layer: int, tokens: list[int]) -> float:
    """What a row holds: a number that depends on its group, its layer and everything before it."""
    return float(hash((group, layer, *tokens)) % 1000 + 1)


class SharedPool(RuleBasedStateMachine):
    """Sequences are admitted, computed in blocks, grown, forked, thrown out; prefixes are found again."""

    size = 4

    @initialize(pages=st.integers(6, 18), radix=st.booleans(), block=st.sampled_from([None, 1, 3, 8]))
    def build(self, pages: int, radix: bool, block: int | None) -> None:
        self.block = block
        self.kv = self.make(pages, RadixIndex(self.size) if radix else PrefixIndex(self.size))
        self.running: list[Sequence] = []
        self.numbers = 0

    def make(self, pages: int, index: PrefixIndex | RadixIndex | None) -> KVCache:
        plain = PlainCodec(torch.float64)
        stores: list[PageStore] = []
        for n in LAYERS:
            geometry = PageGeometry(n, 1, 2, self.size, 3 * pages, torch.float64)
            held = stores[0].held if stores else None
            stores.append(PageStore(plain, plain, geometry, range(n), held=held))
        return KVCache(stores, pages=pages, page_size=self.size, index=index, windows=WINDOWS)

    # -- what happens ---------------------------------------------------------------------------------

    @rule(start=st.integers(0, 2), length=st.integers(2, 60))
    def admit(self, start: int, length: int) -> None:
        tokens = [(start * 7 + i * i) % 11 for i in range(length)]
        if not self.kv.fits(length + 8, self.block):
            return
        self.numbers += 1
        seq = Sequence(
            self.numbers, Request(str(self.numbers), tuple(tokens), SamplingParams()), 0, tokens, 9
        )
        free = self.kv.each_pool[0].free
        if not self.kv.admit(seq, length, block=self.block):
            assert seq.tables == [] and self.kv.each_pool[0].free == free
            assert self.running  # alone it would have fitted
            return
        self.running.append(seq)
        self.rows(seq)

    @precondition(lambda self: getattr(self, "running", None))
    @rule(which=st.integers(0, 9), times=st.integers(1, 12))
    def compute(self, which: int, times: int) -> None:
        """Blocks of a prompt, then decodes; who finds no page throws out the youngest, itself at last."""
        seq = self.running[which % len(self.running)]
        for _ in range(times):
            if seq.pending == 1 and seq.n_generated >= seq.budget:
                return
            if seq.pending == 0:
                seq.tokens.append(seq.tokens[-1] * 3 % 11)
            end = min(seq.computed + (self.block or 99), len(seq.tokens))
            if self.kv.stores[0].codec.grain == "page":  # blocks end where a page does
                end = min(end, (seq.computed // self.size + 1) * self.size)
            while not self.kv.extend(seq, end):
                youngest = self.running.pop()
                self.kv.release(youngest)
                if youngest is seq:
                    assert self.running  # the oldest always has enough
                    return
            self.write(seq, end)
            self.kv.commit(seq, end)

    @precondition(lambda self: getattr(self, "running", None))
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        parent = self.running[which % len(self.running)]
        if parent.pending > 1:
            return
        self.numbers += 1
        child = Sequence(self.numbers, parent.request, 1, list(parent.tokens), parent.budget)
        assert self.kv.fork(parent, child)
        self.running.append(child)

    @precondition(lambda self: getattr(self, "running", None))
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        self.kv.release(self.running.pop(which % len(self.running)))

    @rule()
    def forget(self) -> None:
        self.kv.forget_prefixes()

    # -- what holds ---------------------------------------------------------------------------------------

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        (pool,) = self.kv.each_pool
        refs = [0] * (pool.pages + 1)
        for seq in self.running:
            for g, table in enumerate(seq.tables):
                for page in table:
                    if page != NULL_PAGE:
                        refs[page] += 1
                        assert pool.owners[page] == g
        assert refs == pool.refs
        assert sum(pool.used_by(g) for g in range(3)) == pool.used
        held = self.kv.nbytes(self.running)
        assert min(held.values()) >= 0
        assert sum(held.values()) == sum(self.kv.stores[0].held.nbytes().values())
        assert set(self.kv.stores[0].held.open.rows) <= {p for p, n in enumerate(refs) if n}

    @invariant()
    def rows_are_right(self) -> None:
        for seq in getattr(self, "running", ()):
            self.rows(seq)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            while self.running:
                self.kv.release(self.running.pop())
            assert self.kv.each_pool[0].used == 0 and not self.kv.stores[0].held.open.rows

    # -- inside ----------------------------------------------------------------------------------------

    def write(self, seq: Sequence, end: int) -> None:
        at = torch.arange(seq.computed, end)
        for g, (store, table) in enumerate(zip(self.kv.stores, seq.tables, strict=True)):
            slots = torch.tensor([table[int(i) // self.size] * self.size + int(i) % self.size for i in at])
            store.plan_read(table[seq.computed // self.size :])
            where = store.begin(slots, at)
            for layer in range(LAYERS[g]):
                x = torch.tensor([row(g, layer, seq.tokens[: int(i) + 1]) for i in at], dtype=torch.float64)
                x = x[:, None, None].expand(-1, 1, store.geometry.head_dim)
                store.write(layer, where, x, -x)

    def rows(self, seq: Sequence) -> None:
        """Every row that a later token sees is there, in every layer of its group."""
        for g, (store, table) in enumerate(zip(self.kv.stores, seq.tables, strict=True)):
            first = 0 if WINDOWS[g] is None else max(0, seq.computed - WINDOWS[g] + 1)
            pages = sorted({table[i // self.size] for i in range(first, seq.computed)})
            if not pages:
                continue
            assert NULL_PAGE not in pages
            read = store.plan_read(pages)
            for layer in range(LAYERS[g]):
                k, v = store.read(layer, read)
                for i in range(first, seq.computed):
                    page, slot = table[i // self.size], i % self.size
                    n = page if read.compact is None else read.compact[page]
                    expected = row(g, layer, seq.tokens[: i + 1])
                    assert float(k[n, 0, slot, 0]) == expected == -float(v[n, 0, slot, 0])
                    assert int(store.positions[page * self.size + slot]) == i


class OpenSharedPool(SharedPool):
    """With a format that codes whole pages: rows of a page are read as they were written or as coded."""

    size = 32

    def make(self, pages: int, index: PrefixIndex | RadixIndex | None) -> KVCache:
        codec, plain = KiviCodec(4, 32, 32), PlainCodec(torch.float64)
        stores: list[PageStore] = []
        for n in LAYERS:
            geometry = PageGeometry(n, 1, 32, self.size, 3 * pages, torch.float64)
            held = stores[0].held if stores else None
            stores.append(PageStore(codec, plain, geometry, range(n), held=held))
        return KVCache(stores, pages=pages, page_size=self.size, index=index, windows=WINDOWS)

    def rows(self, seq: Sequence) -> None:
        """Rows of open pages exactly; of coded pages the positions."""
        for g, (store, table) in enumerate(zip(self.kv.stores, seq.tables, strict=True)):
            first = 0 if WINDOWS[g] is None else max(0, seq.computed - WINDOWS[g] + 1)
            for i in range(first, seq.computed):
                page, slot = table[i // self.size], i % self.size
                assert page != NULL_PAGE and int(store.positions[page * self.size + slot]) == i
                if store.is_open(page):
                    n = store.held.open.rows[page]
                    for layer in range(LAYERS[g]):
                        found = float(store.held.open.layers[layer]["k"][n, 0, slot, 0])
                        assert found == row(g, layer, seq.tokens[: i + 1])
                else:
                    assert (i // self.size + 1) * self.size <= seq.computed


CALM = settings(
    max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
)
for case in (SharedPool, OpenSharedPool):
    case.TestCase.settings = CALM
TestSharedPool = SharedPool.TestCase
TestOpenSharedPool = OpenSharedPool.TestCase
