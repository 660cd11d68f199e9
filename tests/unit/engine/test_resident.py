"""A decoded copy of all pages beside the codes: the bits that decoding gives, counted as workspace."""

from __future__ import annotations

import pytest
import torch

from workbench.core.plan import plan
from workbench.engine.params import SamplingParams
from workbench.engine.resident import ResidentStore, mirror_nbytes
from workbench.engine.sequence import Request
from workbench.engine.store import PageStore
from workbench.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("inference")

CODECS = ["kv_fp8", "kv_int8", "kv_fp4", "kivi:residual=32", "xquant:residual=32,schedule=paper,km=1,vm=1"]


def engine_of(lab, decoded: str, *uses: str, page: int = 32, **kwargs):
    return lab.make_engine(f"paged:page_size={page},decoded={decoded}", *uses, **kwargs)


def same_runs(lab, *uses: str, prompts, prepare=lambda engine: None, **kwargs) -> None:
    """Every output token has the same logits with and without the copy, which is what codes decode to."""
    sampling = {k: kwargs.pop(k) for k in ("n", "temperature", "seed") if k in kwargs}
    seen = []
    for decoded in ("streaming", "resident"):
        engine = engine_of(lab, decoded, *uses, **kwargs)
        assert type(engine.kv.stores[0]) is (ResidentStore if decoded == "resident" else PageStore)
        assert ("decoded:resident" in engine.path) == (decoded == "resident")
        prepare(engine)
        rows: list = []
        lab.record_logits(engine, rows)
        ran = [lab.run_engine(engine, prompts, max_tokens=12, logprobs=0, **sampling) for _ in range(2)]
        ids = [
            r.ids(f"r{i}", s) for r in ran for i in range(len(prompts)) for s in range(sampling.get("n", 1))
        ]
        seen.append((ids, [row for _, _, row in rows]))
        engine.kv.check()
        if decoded == "resident":
            mirrors(engine)
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1], seen[1][1], strict=True))


def mirrors(engine) -> None:
    """What attention would read of coded slots is what their codes decode to."""
    for g, (store, pool) in enumerate(zip(engine.kv.stores, engine.kv.pools, strict=True)):
        written = store.positions.view(-1, store.geometry.page_size) >= 0
        coded = written.any(1) if store.codec.grain == "token" else written.all(1)
        coded[list(store.held.open.rows)] = False
        coded &= torch.tensor(pool.owners) == g
        pages = coded.nonzero()[:, 0]
        for layer in range(store.geometry.layers):
            k, v = store.read(layer, store.plan_read([]))
            again = torch.empty_like(k[pages]), torch.empty_like(v[pages])
            store._codecs[layer].decode(store._layers[layer], pages, *again)
            for mine, x in zip((k[pages], v[pages]), again, strict=True):
                assert torch.equal(mine.transpose(1, 2)[written[pages]], x.transpose(1, 2)[written[pages]])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_it_reads_what_would_be_decoded(lab, codec, family):
    prompts = lab.prompts_of(4, seed=5, low=20, high=100)
    same_runs(lab, codec, prompts=prompts, family=family)


@pytest.mark.parametrize("codec", CODECS)
def test_shared_prefixes_forks_and_copies(lab, codec):
    prompts = lab.prompts_of(2, seed=5, low=70, high=71) * 2
    same_runs(lab, codec, "prefix_cache", prompts=prompts, n=3, temperature=3.0, seed=4)
    same_runs(lab, codec, "radix_cache", prompts=[[*p, i] for i, p in enumerate(prompts)])


@pytest.mark.parametrize("codec", CODECS)
def test_preemption_chunks_and_evicted_pages(lab, codec):
    prompts = lab.prompts_of(4, seed=6, low=40, high=80)
    same_runs(lab, codec, "prefix_cache", prompts=prompts, pool=160, budget=7)


@pytest.mark.parametrize("codec", CODECS)
def test_trees_of_drafts_are_compacted(lab, scripted, codec):
    prompts = lab.prompts_of(2, seed=7, low=25, high=40)
    known = []
    plain = engine_of(lab, "streaming", codec)
    for i, ids in enumerate(lab.run_engine(plain, [p], max_tokens=20).ids() for p in prompts):
        known.append(prompts[i] + ids)

    def prepare(engine):
        drafter = scripted.Replay(known, 6, right=lambda seq, round: (seq + round) % 4, trees=True)
        scripted.attach(engine, drafter)

    same_runs(lab, codec, "ngram", prompts=prompts, prepare=prepare)


@pytest.mark.parametrize("codec", ["kv_int8", "kivi:residual=32"])
def test_it_is_workspace_and_claims_no_saving(lab, codec):
    engine, plain = (engine_of(lab, d, codec, dtype="float32") for d in ("resident", "streaming"))
    for made in (engine, plain):
        made.add(Request("a", tuple(range(40)), SamplingParams(max_tokens=4)))
        made.step()
    store = engine.kv.stores[0]
    held = store.nbytes()
    assert held["workspace"] == mirror_nbytes(store.geometry) and held["kv_open"] == 0
    assert held["kv_payload"] == plain.kv.stores[0].nbytes()["kv_payload"]
    whole = lab.make_engine("paged:page_size=32", dtype="float32").kv.stores[0].nbytes()["kv_payload"]
    assert held["workspace"] == whole
    assert engine.memory()["workspace"] == held["workspace"]


def test_formats_that_are_read_in_place_have_no_copy(lab):
    engine = engine_of(lab, "resident")
    assert type(engine.kv.stores[0]) is PageStore and "decoded:resident" not in engine.path
    notes = [
        plan(Recipe.of(*u), lab._facts("llama")).notes
        for u in (["paged:decoded=resident"], ["paged", "kv_int8"])
    ]
    assert not any("saves no memory" in n for ns in notes for n in ns)
    coded = plan(Recipe.of("paged:decoded=resident", "kv_int8"), lab._facts("llama"))
    assert any("saves no memory" in n for n in coded.notes)


def test_rows_put_there_from_elsewhere_are_mirrored(lab):
    engine = engine_of(lab, "resident", "kv_int8", "snapkv:keep=0.5,recent=8")
    lab.run_engine(engine, lab.prompts_of(2, seed=3, low=60, high=90), max_tokens=6)
    mirrors(engine)
