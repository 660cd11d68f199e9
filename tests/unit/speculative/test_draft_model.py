"""A drafter with layers of its own: exact output; KV that follows prefixes, forks and preemption."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import workbench.speculative.draft_model as draft_model
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.coded_head import encoded
from workbench.models.heads import read_head, write_head
from workbench.models.plain import plain_pack
from workbench.spec.errors import HeadMismatch, PlanError
from workbench.speculative.distilled import distilled_decoder
from workbench.training.heads.pruned import layer_tensors

pytestmark = pytest.mark.usefixtures("inference")

PAGE = 4
CUT = "draft_model:k=3,layers=1"


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter has every layer: it is the target."""
    monkeypatch.setattr(draft_model, "layers_kept", lambda target, layers: tuple(range(target)))


def generate(lab: ModuleType, engine, prompts, **params):
    """Output ids by request and sample, and the drafts that were judged."""
    settings = {"max_tokens": 14, "ignore_eos": True, **params}
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(**settings)))
    out: dict[tuple[str, int], list[int]] = {}
    drafts = []
    while engine.has_work:
        step, events = engine.step()
        engine.kv.check()
        drafts += step.drafts
        for e in events:
            out.setdefault((e.request_id, e.sample), []).extend(t.id for t in e.tokens)
    assert not any(pool.used for pool in engine.kv.pools)
    return out, drafts


@pytest.mark.parametrize(
    "uses",
    [(), ("chunked_prefill:budget=16",), ("prefix_cache",), ("radix_cache",), ("kv_int8",), ("kv_fp4",)],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_output_is_the_targets(lab, uses, family):
    plain = lab.make_engine("paged", *uses, page_size=PAGE, family=family)
    drafted = lab.make_engine("paged", CUT, *uses, page_size=PAGE, family=family)
    prompts = lab.prompts_of(4, seed=2, low=5, high=40)
    expected, _ = generate(lab, plain, prompts)
    for _ in range(2):  # the second time with whatever a prefix index kept
        found, drafts = generate(lab, drafted, prompts)
        assert found == expected
        assert any(d.accepted for d in drafts)
        assert family == "gemma3" or any(not d.accepted for d in drafts)


def test_pages_that_are_coded_whole_hold_the_drafters_rows_too(lab):
    expected, _ = generate(
        lab, lab.make_engine("paged", "kivi:residual=32"), lab.prompts_of(2, seed=3, low=20)
    )
    engine = lab.make_engine("paged", "kivi:residual=32", CUT)
    found, drafts = generate(lab, engine, lab.prompts_of(2, seed=3, low=20), max_tokens=14)
    assert found == expected and drafts


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 4}, {"temperature": 0.8, "top_k": 7}])
@pytest.mark.parametrize("uses", [(), ("kv_int8",), ("prefix_cache",)], ids=str)
def test_a_drafter_that_is_the_target_is_always_right(lab, whole, uses, sampling):
    """Gate G8: every draft is accepted whole under R1 and R2, whatever a cached prefix left unfed."""
    engine = lab.make_engine("paged", "draft_model:k=3", *uses, page_size=PAGE)
    prompts = lab.prompts_of(3, seed=6, low=10, high=30)
    for _ in range(2):
        _, drafts = generate(lab, engine, prompts, **sampling)
        assert drafts and all(len(d.accepted) == len(d.tokens) for d in drafts)
        assert {d.rule for d in drafts} == ({"r2"} if sampling else {"r1"})


def test_the_likeliest_tokens_are_judged_as_deterministic(lab):
    engine = lab.make_engine("paged", CUT + ",draws=false", page_size=PAGE)
    _, drafts = generate(lab, engine, lab.prompts_of(2, seed=6, low=10), temperature=1.0, seed=1)
    assert {d.rule for d in drafts} == {"r3"}


def test_its_rows_equal_those_of_a_fresh_prefill(lab):
    """Gate G6 for the drafter: after accepted and rejected drafts."""
    engine = lab.make_engine("paged", CUT, page_size=PAGE)
    prompt = lab.prompts_of(1, seed=9, low=20, high=21)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=90, ignore_eos=True)))
    (seq,) = engine.sequences("a")
    for _ in range(15):
        engine.step()
    n, text, store = seq.drafted, list(seq.tokens), engine.kv.stores[0]
    assert n >= 24
    layer = store.geometry.layers - 1

    def rows(store, seq):
        plane = store.planes["k"][layer][seq.tables[0]]
        return plane.transpose(1, 2).flatten(0, 1)[:n]

    mine = rows(store, seq).clone()
    other = lab.make_engine("paged", CUT, page_size=PAGE)
    other.add(Request("a", tuple(text), SamplingParams(max_tokens=30, ignore_eos=True)))
    (fresh,) = other.sequences("a")
    other.step()
    other.step()
    assert fresh.drafted >= n
    torch.testing.assert_close(mine, rows(other.kv.stores[0], fresh), rtol=0, atol=1e-12)


def test_a_cached_prefix_is_not_fed_again(lab, monkeypatch):
    engine = lab.make_engine("paged", "prefix_cache", CUT, page_size=PAGE)
    prompt = lab.prompts_of(1, seed=4, low=33, high=34)[0]
    generate(lab, engine, [prompt])
    fed: list[int] = []
    runner = engine.drafting.runner
    run = runner._run

    def counted(rows, logits=1):
        fed.extend(len(tokens) for _, tokens in rows)
        return run(rows, logits)

    monkeypatch.setattr(runner, "_run", counted)
    generate(lab, engine, [prompt])
    assert max(fed) <= PAGE + 1


def test_samples_and_preemption(lab):
    prompts = lab.prompts_of(3, seed=5, low=10, high=30)
    plain, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts)
    engine = lab.make_engine("paged", CUT, page_size=PAGE)
    lab.preempt_at(engine, {3, 6, 7}.__contains__)
    found, _ = generate(lab, engine, prompts)
    assert found == plain
    several, drafts = generate(lab, engine, prompts[:1], n=3, temperature=1.0, seed=3)
    assert len(several) == 3 and drafts


@pytest.mark.parametrize("layers", [2, 40])
def test_as_many_layers_as_the_target_are_a_conflict(lab, layers):
    with pytest.raises(PlanError, match="the target has 2"):
        lab.make_engine("paged", f"draft_model:layers={layers}")


@pytest.mark.parametrize(
    "target, layers, kept",
    [(30, 0, (0, 1, 2, 3, 4, 5, 29)), (30, 2, (0, 29)), (30, 1, (0,)), (2, 0, (0,)), (4, 3, (0, 1, 3))],
)
def test_the_first_layers_and_the_last(target, layers, kept):
    assert draft_model.layers_kept(target, layers) == kept


def test_the_drafter_shares_the_targets_storages(lab):
    engine = lab.make_engine("paged", CUT)
    own, target = engine.drafting.runner._executor.decoder, engine.executor.decoder
    assert own.weights.embed.data_ptr() == target.weights.embed.data_ptr()
    assert own.weights.layers[0] is target.weights.layers[0]
    assert engine.memory()["draft"] < 1 << 20


def put_layers(lab, random_heads, cache, family="llama", kept=(0, 1), coded=False, **facts):
    """A file of "distilled" layers that are the target's own."""
    source = lab.random_source(family)
    tensors = {n: t.double() for n, t in layer_tensors(source, kept).items()}
    tensors["ids"] = torch.randperm(
        source.config.vocab_size, generator=torch.Generator().manual_seed(2)
    ).int()
    facts = {"begun": list(kept), **facts}
    return random_heads.put(
        cache,
        f"random-{family}",
        "draft",
        source.fingerprint,
        encoded(tensors) if coded else tensors,
        **facts,
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.1, "seed": 4}])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_distilled_layers_are_read_as_the_targets_are(lab, random_heads, cache, family, sampling):
    """All layers of the target, from a file: every draft is accepted whole, whatever the family."""
    put_layers(lab, random_heads, cache, family, range(lab.random_source(family).config.num_layers))
    engine = lab.make_engine("paged", "draft_model:k=3,vocab=0", page_size=PAGE, family=family)
    _, drafts = generate(lab, engine, lab.prompts_of(3, seed=6, low=10, high=30), **sampling)
    assert drafts and all(len(d.accepted) == len(d.tokens) for d in drafts)
    assert {d.rule for d in drafts} == ({"r2"} if sampling else {"r1"})
    assert engine.memory()["draft"] > sum(
        x.n * x.k for x in engine.executor.decoder.weights.layers[0].linears
    )


@pytest.mark.parametrize("uses", [(), ("prefix_cache",), ("kv_int8",)], ids=str)
def test_output_is_the_targets_whatever_vocabulary_is_drafted(lab, random_heads, cache, uses):
    prompts = lab.prompts_of(4, seed=2, low=5, high=40)
    put_layers(lab, random_heads, cache, kept=(1,), coded=True)
    expected, _ = generate(lab, lab.make_engine("paged", *uses, page_size=PAGE), prompts)
    engine = lab.make_engine("paged", "draft_model:k=3,vocab=20", *uses, page_size=PAGE)
    ids = engine.drafting.drafter._ids
    assert len(ids) == 20
    for _ in range(2):
        found, drafts = generate(lab, engine, prompts)
        assert found == expected
        assert {t for d in drafts for t in d.tokens} <= set(ids.tolist())
    mean = []
    for confidence in (0.0, 0.9):
        use = f"draft_model:k=3,vocab=20,confidence={confidence}"
        engine = lab.make_engine("paged", use, page_size=PAGE)
        _, drafts = generate(lab, engine, prompts, temperature=1.0, seed=5)
        assert {d.rule for d in drafts} == {"r2"}
        mean.append(sum(len(d.tokens) for d in drafts) / len(drafts))
    assert mean[0] > mean[1]


def test_layers_are_found_by_themselves_unless_others_are_asked_for(lab, random_heads, cache):
    def kept(use):
        return lab.make_engine("paged", use).drafting.drafter._kept

    assert kept("draft_model") == (0,)
    with pytest.raises(PlanError, match="workbench train draft"):
        kept("draft_model:source=trained")
    put_layers(lab, random_heads, cache, kept=(1, 0))
    assert kept("draft_model") == kept("draft_model:source=trained") == (1, 0)
    assert kept("draft_model:source=cut") == kept("draft_model:layers=1") == (0,)
    with pytest.raises(PlanError, match="Leave it at 0"):
        kept("draft_model:source=trained,layers=1")


@pytest.mark.parametrize("begun", [None, [], [0, 2], ["0"], 1])
def test_layers_of_another_model_are_refused(lab, random_heads, cache, begun):
    put_layers(lab, random_heads, cache, begun=begun)
    with pytest.raises(PlanError, match="Train it again"):
        lab.make_engine("paged", "draft_model:source=trained")


@pytest.mark.parametrize("change", ["missing", "shape", "step", "weights"])
def test_a_file_that_does_not_fit_is_named(lab, random_heads, cache, change):
    path = put_layers(lab, random_heads, cache, coded=True)
    head = read_head(path)
    tensors, name, fingerprint = head.tensors(), "model.layers.1.mlp.down_proj.weight", head.fingerprint
    if change == "missing":
        del tensors[name], tensors[f"{name}.step"]
    elif change == "shape":
        tensors[name] = tensors[name][:, :-1].contiguous()
    elif change == "step":
        del tensors[name]
    else:
        fingerprint = "0" * 64
    write_head(path, "draft", fingerprint, head.facts, tensors)
    target = lab.make_engine("paged").executor.decoder
    with pytest.raises(HeadMismatch) as refused:
        distilled_decoder(read_head(path), 0, target, plain_pack(torch.float64, "pinned"))
    assert "Train it again" in refused.value.hint
