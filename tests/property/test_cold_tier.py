"""Random evictions and restores against dictionaries: a page that comes back is the codec's round trip of its
own exact rows, once, and never another prefix's.

Rows spell their whole ancestry, and the codec adds one to what it is given: so a row is exact, or one more,
and two more would have been coded twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.engine.at_rest import Coded, Pages
from workbench.engine.cold import ColdTier
from workbench.engine.cold_pages import ColdPages
from workbench.engine.kv import KVCache
from workbench.engine.params import SamplingParams
from workbench.engine.prefix import PrefixIndex
from workbench.engine.radix import RadixIndex
from workbench.engine.seams import PageGeometry
from workbench.engine.sequence import Request
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.engine.store import PageStore
from workbench.kv.cold_store import DiskStore, RamStore
from workbench.kv.plain import PlainCodec
from workbench.models.config import KVGroup

SIZE, PAGES = 2, 5
STEMS = ((0, 1, 0, 1, 2, 2, 0, 1, 1, 0), (0, 1, 0, 1, 1, 1, 2, 0, 0, 1), (2, 1, 0, 0, 2, 1, 1, 2, 0, 0))
TOKENS = st.one_of(
    st.builds(lambda stem, n: list(stem[:n]), st.sampled_from(STEMS), st.integers(3, 2 * PAGES)),
    st.lists(st.integers(0, 2), min_size=1, max_size=2 * PAGES),
)
"""Beginnings of a few texts, so that they meet again, or anything."""


def row(salt: str, prefix: Sequence[int]) -> float:
    """A number that no two prefixes of this test share."""
    value = 7.0 if salt else 3.0
    for token in prefix:
        value = value * 4 + token + 1
    return value


class PlusOne:
    """A codec with a loss that adds up."""

    name, lossy, key, nbytes = "plus one", True, "plus/1", 0

    def encode(self, pages: Pages, progress: object = None, cancel: object = None) -> Coded:
        k, v = pages.read(0)
        return Coded({}, {"k": (k + 1).numpy().tobytes(), "v": (v + 1).numpy().tobytes()})

    def decode(self, coded: Coded, pages: Pages, progress: object = None, cancel: object = None) -> None:
        k, v = (
            torch.frombuffer(bytearray(coded.streams[n]), dtype=torch.float64).view(pages.tokens, 1, 2)
            for n in "kv"
        )
        pages.write(0, k, v)

    def join(self, pages: Sequence[Coded]) -> Coded:
        return Coded({}, {n: b"".join(p.streams[n] for p in pages) for n in "kv"})


class Cold(RuleBasedStateMachine):
    """``given``: all prefixes that were ever given up; nothing is dropped while the limit is far."""

    limit = 1 << 20

    def make_index(self) -> PrefixIndex | RadixIndex:
        return PrefixIndex(SIZE)

    def make_store(self) -> RamStore | DiskStore:
        return RamStore()

    @initialize()
    def fresh(self) -> None:
        geometry = PageGeometry(1, 1, 2, SIZE, PAGES, torch.float64)
        plain = PlainCodec(torch.float64)
        stores = [PageStore(plain, plain, geometry)]
        self.kv = KVCache(stores, pages=PAGES, page_size=SIZE, namespace=b"n", index=self.make_index())
        self.tier = ColdTier(PlusOne(), self.make_store(), self.limit)
        self.kv.cold = ColdPages(self.tier, stores, [KVGroup((0,), None)])
        self.given: set[tuple[bytes, tuple[int, ...]]] = set()
        keep = self.tier.keep

        def spy(namespace: bytes, ancestry: Sequence[tuple[int, ...]], pages: Pages, again: bool) -> None:
            self.given.add((namespace, sum(ancestry, ())))
            keep(namespace, ancestry, pages, again)

        self.tier.keep = spy  # type: ignore[method-assign]
        self.running: list[EngineSequence] = []

    def expected(self, tokens: list[int], namespace: bytes) -> int:
        """Pages found in the pool, then in the tier."""
        known = len(self.kv.index.match(tokens, namespace, len(tokens) - 1).full)
        while (known + 1) * SIZE < len(tokens) and (
            namespace,
            tuple(tokens[: (known + 1) * SIZE]),
        ) in self.given:
            known += 1
        return known

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "s"]), stay=st.sampled_from([False, False, False, True]))
    def run(self, tokens: list[int], salt: str, stay: bool) -> None:
        """A request: admitted, its found rows checked, the others computed, then over or still running."""
        seq = EngineSequence(0, Request("r", tuple(tokens), SamplingParams(), salt=salt), 0, list(tokens), 0)
        found = self.expected(tokens, b"n" + salt.encode())
        if not self.kv.admit(seq, len(tokens)):
            assert self.running
            return
        if isinstance(self.kv.index, PrefixIndex) and self.limit > 1 << 10:
            assert seq.computed == found * SIZE
        assert seq.computed <= max(found * SIZE, seq.computed // SIZE * SIZE + SIZE - 1)
        self.check_rows(seq)
        self.compute(seq)
        self.check_rows(seq)
        if stay:
            self.running.append(seq)
        else:
            self.kv.release(seq)

    @rule()
    def finish(self) -> None:
        if self.running:
            self.kv.release(self.running.pop(0))

    @precondition(lambda self: len(self.given) > 12)
    @rule()
    def forget(self) -> None:
        """Every prefix is forgotten, the cold ones too."""
        self.kv.forget_prefixes()
        self.given.clear()
        assert not len(self.tier) and self.tier.held == 0

    def compute(self, seq: EngineSequence) -> None:
        store, table = self.kv.stores[0], torch.tensor(seq.tables[0])
        at = torch.arange(seq.computed, len(seq.tokens))
        rows = torch.tensor([row(seq.request.salt, seq.tokens[: i + 1]) for i in at], dtype=torch.float64)
        x = rows[:, None, None].expand(-1, 1, 2)
        store.write(0, store.begin(table[at // SIZE] * SIZE + at % SIZE, at), x, -x)
        self.kv.commit(seq, len(seq.tokens))

    def check_rows(self, seq: EngineSequence) -> None:
        store, table = self.kv.stores[0], seq.tables[0]
        for i in range(seq.computed):
            page, slot = table[i // SIZE], i % SIZE
            expected = row(seq.request.salt, seq.tokens[: i + 1])
            k, v = (
                float(store.planes["k"][0, page, 0, slot, 0]),
                float(store.planes["v"][0, page, 0, slot, 0]),
            )
            assert (k, v) in ((expected, -expected), (expected + 1, 1 - expected)), (i, k, expected)
            assert int(store.positions[page * SIZE + slot]) == i

    @invariant()
    def books(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check()
            assert self.tier.held <= self.limit and (self.tier.held > 0) == (len(self.tier) > 0)
            assert self.kv.nbytes([])["kv_cold"] == self.tier.store.memory

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            folder = getattr(self.tier.store, "folder", None)
            self.kv.close()
            assert folder is None or not Path(folder).exists()


class Small(Cold):
    """Six pages fit: the least recently used leave."""

    limit = 6 * 2 * SIZE * 2 * 8


class RadixCold(Cold):
    """Where a prompt leaves the tree inside a page, its head is copied."""

    def make_index(self) -> RadixIndex:
        return RadixIndex(SIZE)


class OnDisk(Cold):
    """Pages in files."""

    def make_store(self) -> DiskStore:
        return DiskStore()


CALM = settings(
    max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
)
for case in (Cold, Small, RadixCold, OnDisk):
    case.TestCase.settings = CALM
TestCold = Cold.TestCase
TestSmall = Small.TestCase
TestRadixCold = RadixCold.TestCase
TestOnDisk = OnDisk.TestCase
