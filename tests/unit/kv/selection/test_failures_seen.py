"""Ways in which evicting caches went wrong elsewhere: offsets, filler rows, padding."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.core import catalog
from workbench.engine.params import SamplingParams
from workbench.engine.seams import AttentionShape, AttentionSpan, PageGeometry
from workbench.engine.sequence import Request
from workbench.engine.store import PageStore
from workbench.kv.plain import PlainCodec
from workbench.models.rope import RopeTable, apply_rope
from workbench.models.rope_spec import RopeSpec

pytestmark = pytest.mark.usefixtures("inference")

IDS = [i for i in catalog.MODULES if catalog.get(i).spec.seam == "kv_selector"]
ops = pytest.mark.parametrize("op", [TorchPages(), PinnedAttention()], ids=lambda o: o.name)
HEADS, DIM, PAGE = 2, 8, 4


@ops
@pytest.mark.parametrize("size", [1, 3, 5])
def test_kvc_02_attention_depends_on_relative_positions_whatever_the_write_size(op: Any, size: int) -> None:
    """Five tokens that were kept, at positions 300 to 304 or at 0 to 4, in the first slots of a cache."""
    gen = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(n, HEADS, DIM, generator=gen, dtype=torch.float64) for n in (6, 6, 1))
    table = RopeTable(RopeSpec(), DIM, 1024, torch.float64)

    def attended(first: int, size: int) -> torch.Tensor:
        positions = torch.arange(first, first + 6)
        cos, sin = (t[:, None] for t in table.gather(positions, first + 5))
        keys = apply_rope(k, cos, sin)
        codec = PlainCodec(torch.float64)
        store = PageStore(codec, codec, PageGeometry(1, HEADS, DIM, PAGE, 4, torch.float64))
        pages = [3, 1]
        store.reset(pages)
        for begin in range(0, 6, size):
            at = torch.arange(begin, min(begin + size, 6))
            slots = torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE
            store.write(0, store.begin(slots, positions[at]), keys[at], v[at])
        span = AttentionSpan(1, 5, pages, [first + 5])
        shape = AttentionShape(HEADS, HEADS, DIM, PAGE)
        return op.run(
            op.prepare([span], shape), apply_rope(q, cos[5:], sin[5:]), *store.read(0, store.plan_read(pages))
        )

    near = attended(0, 5)
    torch.testing.assert_close(attended(300, size), near, rtol=0, atol=1e-9)
    torch.testing.assert_close(attended(0, size), near, rtol=0, atol=1e-12)


@ops
def test_kvc_03_a_head_that_keeps_fewer_rows_attends_to_no_filler(op: Any) -> None:
    """Each head has a table of its own; what lies behind its rows may be anything."""
    k, v = (torch.full((3, 1, PAGE, DIM), float("nan"), dtype=torch.float64) for _ in "kv")
    k[1, 0, :2], v[1, 0, 0], v[1, 0, 1] = 0.0, 1.0, 3.0
    k[2, 0], v[2, 0] = 0.0, torch.arange(4.0, dtype=torch.float64)[:, None].expand(4, DIM)
    q = torch.ones(1, 1, DIM, dtype=torch.float64)
    shape = AttentionShape(1, 1, DIM, PAGE)
    out = [
        op.run(op.prepare([AttentionSpan(1, kept - 1, [page], [99])], shape), q, k.clone(), v.clone())
        for page, kept in ((2, 4), (1, 2))
    ]
    assert out[0].unique().tolist() == [1.5] and out[1].unique().tolist() == [2.0]


@pytest.mark.parametrize("id", IDS)
def test_kvc_05_a_neighbour_of_another_length_changes_nothing(lab: ModuleType, id: str) -> None:
    prompts = [(5, 6, 7, 8, 9), (11, 12, 13, 14, 15, 16, 17, 18)]
    recent = {"snapkv": ",recent=2"}.get(id, "")
    alone = [kept_of(lab, f"{id}:keep=0.5,sinks=1{recent}", [p])[0] for p in prompts]
    assert kept_of(lab, f"{id}:keep=0.5,sinks=1{recent}", prompts) == alone
    assert {len(s) for heads in alone[0][0] for s in heads} == {2} or id == "adacurdkv"


def kept_of(lab: ModuleType, use: str, prompts: Any) -> list[Any]:
    """What is kept of each prompt and the scores of what follows, in one batch."""
    made = lab.make_engine("paged", use, page_size=PAGE)
    for i, prompt in enumerate(prompts):
        made.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0)))
    _, events = made.step()
    kept = []
    for i in range(len(prompts)):
        (seq,) = made.sequences(f"r{i}")
        kept.append([[s.tolist() for s in heads] for _, heads in sorted(seq.kept.items())])
    while made.has_work:
        events += made.step()[1]
    return [
        (kept[i], [t.logprob for e in events if e.request_id == f"r{i}" for t in e.tokens])
        for i in range(len(prompts))
    ]
