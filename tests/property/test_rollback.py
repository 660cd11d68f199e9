"""1,000 random accept / reject schedules per KV format leave what a fresh encode of the same rows leaves.

No model: a token's K and V are a function of its id and position, so a schedule is only drafts, verdicts,
moves and commits, through the real tables, pages and planes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.engine.kv import KVCache
from workbench.engine.params import SamplingParams
from workbench.engine.seams import KVCodec, PageGeometry
from workbench.engine.sequence import Request, Sequence
from workbench.engine.store import PageStore
from workbench.kv.plain import PlainCodec
from workbench.kv.ranges import VARIANTS, KVRanges

LAYERS, HEADS, DIM, VOCAB, LONGEST = 1, 2, 64, 7, 80
SCHEDULES = 1_000
FORMATS = [
    "plain",
    *(f"kv_fp8:scale={s}" for s in ("token", "head", "layer", "unit")),
    "kv_int8",
    *(f"kv_fp4:format={f}" for f in ("nvfp4", "mxfp4")),
    "kv_fp4:rotate=true,affine=true",
    "kivi:bits=4,residual=32",
    "kivi:bits=2,residual=32",
    "xquant:schedule=none,residual=32",
]
_gen = torch.Generator().manual_seed(0)
BY_TOKEN = torch.randn(2, LAYERS, VOCAB, HEADS, DIM, generator=_gen)
BY_POSITION = torch.randn(2, LAYERS, LONGEST, HEADS, DIM, generator=_gen)
RANGES = KVRanges(
    torch.zeros(2, LAYERS, HEADS, DIM),
    dict.fromkeys(VARIANTS, torch.full((2, LAYERS, HEADS), 6.0)),
    "test",
    1,
)


def codec_of(lab, text: str) -> tuple[KVCodec, int]:
    """A format of the catalogue and a page size it takes."""
    if text == "plain":
        return PlainCodec(torch.float32), 8
    from workbench.spec.recipe import Use

    use = Use.parse(text)
    technique = catalog.get(use.id)
    config = lab.random_source("llama").config
    context = BindContext(config, torch.float32, "fast", torch.device("cpu"), 8, kv_ranges=RANGES)
    codec = technique.bind(technique.configure(dict(use.options)), context)
    return codec, (codec.page_sizes(DIM) or (8,))[0]


class Cache:
    """One sequence in a cache of its own."""

    def __init__(self, codec: KVCodec, page: int) -> None:
        geometry = PageGeometry(LAYERS, HEADS, DIM, page, -(-LONGEST // page) + 1, torch.float32)
        self.store = PageStore(codec, PlainCodec(torch.float32), geometry)
        self.kv = KVCache([self.store], pages=geometry.pages, page_size=page)
        self.page, self.whole = page, codec.grain == "page"

    def start(self, tokens: Seq[int]) -> Sequence:
        seq = Sequence(0, Request("a", tuple(tokens), SamplingParams()), 0, list(tokens), LONGEST)
        assert self.kv.admit(seq, len(tokens))
        return seq

    def room(self, seq: Sequence) -> int:
        """Rows until a page that is coded whole ends."""
        return self.page - seq.computed % self.page if self.whole else LONGEST

    def write(self, seq: Sequence, tokens: Seq[int], positions: Seq[int]) -> None:
        """What a forward pass writes behind the committed rows."""
        first = seq.computed
        assert self.kv.extend(seq, first + len(tokens))
        table = seq.tables[0]
        slots = [table[i // self.page] * self.page + i % self.page for i in range(first, first + len(tokens))]
        self.store.plan_read(table)
        where = self.store.begin(torch.tensor(slots), torch.tensor(positions))
        for layer in range(LAYERS):
            k, v = BY_TOKEN[:, layer, list(tokens)] + BY_POSITION[:, layer, list(positions)]
            self.store.write(layer, where, k, v)

    def content(self, seq: Sequence) -> dict[str, torch.Tensor]:
        """Everything attention could read of the sequence, and the bytes of its full pages."""
        n, table = seq.computed, seq.tables[0][: -(-seq.computed // self.page)]
        out = {}
        for layer in range(LAYERS):
            read = self.store.plan_read(table)
            ids = table if read.compact is None else [read.compact[p] for p in table]
            for name, pages in zip("kv", self.store.read(layer, read), strict=True):
                out[f"{name}{layer}"] = pages[ids].transpose(1, 2).flatten(0, 1)[:n].clone()
        for name, plane in self.store.planes.items():
            raw = plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
            out[name] = raw[:, [p for p in table[: n // self.page] if not self.store.is_open(p)]].clone()
        return out


def random_schedule(cache: Cache, rng: random.Random) -> Sequence:
    """Prefill a random prompt in random chunks, then rounds of drafts of which a random path is kept."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    seq = cache.start(prompt)
    while seq.computed < len(prompt) - 1:
        n = min(rng.randrange(1, 12), len(prompt) - 1 - seq.computed, cache.room(seq))
        at = range(seq.computed, seq.computed + n)
        cache.write(seq, [prompt[i] for i in at], list(at))
        cache.kv.commit(seq, seq.computed + n)
    for _ in range(rng.randrange(1, 6)):
        base = seq.computed
        n = min(rng.randrange(0, 7), cache.room(seq) - 1, LONGEST - 2 - len(seq.tokens))
        if n < 0:
            break
        parents = [rng.randrange(-1, i) if rng.random() < 0.5 else i - 1 for i in range(n)]
        drafted = [rng.randrange(VOCAB) for _ in range(n)]
        depths: list[int] = []
        for p in parents:
            depths.append(1 if p < 0 else depths[p] + 1)
        cache.write(seq, [seq.tokens[-1], *drafted], [base, *(base + d for d in depths)])
        path: list[int] = []
        node = -1
        while (children := [i for i in range(n) if parents[i] == node]) and rng.random() < 0.6:
            node = rng.choice(children)
            path.append(node)
        if path and path != list(range(len(path))):
            first = base + 1
            cache.kv.move(seq, [first + i for i in path], list(range(first, first + len(path))))
        seq.tokens += [drafted[i] for i in path] + [rng.randrange(VOCAB)]
        cache.kv.commit(seq, base + 1 + len(path))
    return seq


@pytest.mark.parametrize("text", FORMATS)
def test_rejected_drafts_leave_no_trace(lab, text: str) -> None:
    codec, page = codec_of(lab, text)
    cache, fresh = Cache(codec, page), Cache(codec, page)
    for number in range(SCHEDULES):
        seq = random_schedule(cache, random.Random(number))
        other = fresh.start(seq.tokens)
        while other.computed < seq.computed:
            n = min(seq.computed - other.computed, fresh.room(other))
            at = range(other.computed, other.computed + n)
            fresh.write(other, [seq.tokens[i] for i in at], list(at))
            fresh.kv.commit(other, other.computed + n)
        mine, theirs = cache.content(seq), fresh.content(other)
        for name, rows in theirs.items():
            assert torch.equal(mine[name], rows), f"schedule {number}: {name} differs"
        for one, each in ((cache, seq), (fresh, other)):
            one.kv.release(each)
            one.kv.check()
            assert one.kv.pools[0].used == 0


def test_the_check_sees_a_row_that_was_not_moved(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without compaction of accepted paths the same schedules are told apart."""
    monkeypatch.setattr(KVCache, "move", lambda self, seq, source, target: None)
    with pytest.raises(AssertionError, match="differs"):
        test_rejected_drafts_leave_no_trace(lab, "kv_int8")
