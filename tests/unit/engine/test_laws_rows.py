"""The four laws on real engines: numerics of a class, explicit commit, positions, cache keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from workbench.core.build_kv import build_kv, namespace
from workbench.core.plan import plan, require
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("inference")

CODECS = ["", "kv_fp8", "kv_int8", "kivi:residual=32,group=32"]
PROMPT = [7, 3, 9, 1, 4, 8, 2, 6, 5, 40, 41, 42, 40, 41, 42, 33, 20, 21, 22, 23, 7, 3, 9]  # 23 tokens


def start(engine, prompt, **sampling):
    engine.add(Request("a", tuple(prompt), SamplingParams(**sampling)))
    return engine.sequences("a")[0]


def step_until(engine, seq, computed: int) -> None:
    while seq.computed < computed and engine.has_work:
        engine.step()


# -- law 1 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["pinned", "fast"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("uses", [("ngram:k=4",), ("paged", "kv_int8"), ("paged", "kivi"), ("rtn",)], ids=str)
def test_law_1_off_on_off_is_bitwise(lab, numerics, dtype, uses):
    def logits(*recipe: str) -> list[torch.Tensor]:
        engine = lab.make_engine(*recipe, dtype=dtype, numerics=numerics, pool=512, context=128)
        sink: list = []
        lab.record_logits(engine, sink)
        lab.run_engine(engine, [PROMPT, PROMPT[5:12]], max_tokens=5)
        return [row for _, _, row in sink]

    off = logits()
    on = logits(*uses)
    again = logits()
    assert len(off) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(off, again, strict=True))
    if uses == ("paged", "kv_int8"):
        assert not all(torch.equal(a, b) for a, b in zip(off, on, strict=False))  # it was on indeed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_law_1_fast_runs_part_only_where_the_margin_is_within_twice_the_noise(lab, scripted, dtype):
    """Noise is measured where both paths saw the same tokens; each parting is judged at its own margin."""
    prompts = lab.prompts_of(12, seed=3, low=4, high=40)

    def run(*uses, drafter=None):
        engine = lab.make_engine("paged", *uses, dtype=dtype, numerics="fast", pool=4096)
        if drafter is not None:
            scripted.attach(engine, drafter)
        sink: list = []
        lab.record_logits(engine, sink)
        ran = lab.run_engine(engine, prompts, max_tokens=24)
        rows = {(seq, p): row.float() for seq, p, row in sink}
        return [ran.ids(f"r{i}") for i in range(len(prompts))], rows

    plain_ids, plain = run()
    known = [p + o for p, o in zip(prompts, plain_ids, strict=True)]
    others = [
        run("chunked_prefill:budget=16"),
        run("ngram", drafter=scripted.Replay(known, 4, right=lambda s, r: (s + r) % 5)),
    ]
    for ids, rows in others:
        noise, partings = 0.0, []
        for i, (a, b) in enumerate(zip(plain_ids, ids, strict=True)):
            n = next((j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            first = len(prompts[i]) - 1
            for j in range(len(a) if n is None else n):
                at = (i + 1, first + j)
                noise = max(noise, float((plain[at] - rows[at]).abs().max()))
            if n is not None:
                best = plain[i + 1, first + n].topk(2).values
                partings.append(float(best[0] - best[1]))
        assert noise < (1e-4 if dtype == "float32" else 0.5)
        assert all(margin < 2 * noise for margin in partings)


# -- law 2 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_law_2_drafts_leave_no_trace_in_committed_kv(lab, scripted, codec, trees, family):
    """Byte for byte over committed slots, positions included, after steps that accept 0 to 4 drafts."""
    uses = [codec] if codec else []
    n = 14
    plain = lab.make_engine(
        "paged:page_size=32" if not codec.startswith("kivi") else "paged", *uses, family=family
    )
    seq = start(plain, PROMPT, max_tokens=n + 8)
    step_until(plain, seq, len(PROMPT) + n)
    known = list(seq.tokens)
    engine = lab.make_engine(
        "paged:page_size=32" if not codec.startswith("kivi") else "paged", *uses, "ngram", family=family
    )
    scripted.attach(engine, scripted.Replay([known], 8, right=lambda s, r: (3 * r) % 5, trees=trees))
    twin = start(engine, PROMPT, max_tokens=n + 8)
    rejected = accepted = 0
    while twin.computed < len(PROMPT) + n - 4:
        step, _ = engine.step()
        for d in step.drafts:
            accepted += len(d.accepted)
            rejected += len(d.tokens) - len(d.accepted)
        assert twin.tokens == known[: len(twin.tokens)]
        got = scripted.stored(engine, twin)
        assert scripted.same(got, _prefix_of(lab, scripted, plain, seq, twin.computed, codec))
    assert accepted > 0
    assert rejected > 0
    assert twin.computed > 32  # a page was filled on the way


def _prefix_of(lab, scripted, plain, seq, computed: int, codec: str):
    """What the plain run stored of the first ``computed`` tokens."""
    if not codec.startswith("kivi"):
        return scripted.stored(plain, seq, computed)
    if computed // 32 == seq.computed // 32:
        return scripted.stored(plain, seq, computed)
    fresh = lab.make_engine("paged", codec, family=_family(plain))
    twin = start(fresh, seq.tokens[: len(PROMPT)], max_tokens=30)
    step_until(fresh, twin, computed)
    return scripted.stored(fresh, twin)


def _family(engine) -> str:
    return "gemma3" if engine.executor.decoder.config.sandwich_norms else "llama"


@pytest.mark.parametrize("codec", CODECS)
def test_law_2_an_aborted_request_leaves_no_trace(lab, scripted, codec):
    uses = ["paged", *([codec] if codec else [])]
    clean = lab.run_engine(lab.make_engine(*uses), [PROMPT], max_tokens=12, logprobs=0)
    engine = lab.make_engine(*uses, "ngram")
    scripted.attach(engine, scripted.Replay([], 6, trees=True))
    start(engine, PROMPT[::-1], max_tokens=40)
    for _ in range(6):
        engine.step()
    engine.abort("a")
    assert engine.kv.pools[0].used == 0
    assert engine.memory()["draft"] == 0
    engine.drafting.drafter = None
    again = lab.run_engine(engine, [PROMPT], max_tokens=12, logprobs=0)
    assert again.ids() == clean.ids()
    assert again.logprobs() == clean.logprobs()


def test_law_2_an_exception_inside_a_forward_publishes_nothing(lab):
    engine = lab.make_engine("paged", "prefix_cache", page_size=4, pool=256)
    forward = engine.executor.forward

    def fails(*args, **kwargs):
        forward(*args, **kwargs)
        raise RuntimeError("out of memory")

    engine.executor.forward = fails
    start(engine, PROMPT, max_tokens=4)
    with pytest.raises(RuntimeError):
        engine.step()
    engine.reset()
    assert len(engine.kv.index) == 0
    assert engine.kv.pools[0].used == engine.kv.pools[0].cached == 0
    engine.executor.forward = forward
    clean = lab.run_engine(
        lab.make_engine("paged", page_size=4, pool=256), [PROMPT], max_tokens=4, logprobs=0
    )
    again = lab.run_engine(engine, [PROMPT], max_tokens=4, logprobs=0)
    assert again.cached() == 0
    assert again.logprobs() == clean.logprobs()


# -- law 3 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 7, 31, 33, 0])
def test_law_3_blocks_end_where_a_codec_changes_how_tokens_are_seen(lab, budget):
    prompt = (PROMPT * 4)[:70]
    engine = lab.make_engine("paged", "kivi:residual=32,group=32", budget=budget)
    spans: list = []
    prepare = engine.executor.prepare
    engine.executor.prepare = lambda p: (spans.extend(p.spans), prepare(p))[1]
    sink: list = []
    lab.record_logits(engine, sink)
    seq = start(engine, prompt, max_tokens=3)
    sizes: list[list[int]] = []  # which of its pages are open before each step that follows
    while engine.has_work:
        opened = engine.kv.stores[0].held.open.rows
        if seq.tables:
            sizes.append([i for i, page in enumerate(seq.tables[0]) if page in opened])
        engine.step()
    assert all(s.start // 32 == (s.start + s.n_new - 1) // 32 for s in spans)
    assert max(map(len, sizes)) == 1  # never more than the page that is being filled
    assert sizes[-1] == [2]  # pages 0 and 1 are coded
    whole: list = []
    other = lab.make_engine("paged", "kivi:residual=32,group=32")
    lab.record_logits(other, whole)
    lab.run_engine(other, [prompt], max_tokens=3)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(sink, whole, strict=True))


# -- law 4 ----------------------------------------------------------------------------------------------


def _namespace(lab, *uses: str, family: str = "llama", **where) -> bytes:
    where = {"dtype": "float64", "numerics": "pinned", **where}
    made = require(plan(Recipe.of(*uses), lab._facts(family), limits=EngineLimits(256, 0, 4, 64), **where))
    weights = Recipe(tuple(u for u in made.recipe if u.id == "rtn"))
    decoder = lab._decoder(family, made.dtype, made.numerics, weights, "cpu")
    return build_kv(made, decoder).namespace


def test_law_4_everything_that_shapes_a_page_is_in_its_key(lab):
    variants = {
        "plain": _namespace(lab, "paged"),
        "page size": _namespace(lab, "paged:page_size=32"),
        "int8": _namespace(lab, "paged", "kv_int8"),
        "fp8": _namespace(lab, "paged", "kv_fp8"),
        "kivi 4": _namespace(lab, "paged", "kivi"),
        "kivi 2": _namespace(lab, "paged", "kivi:bits=2"),
        "kivi residual": _namespace(lab, "paged", "kivi:residual=64"),
        "attention": _namespace(lab, "paged", "reference"),
        "numerics": _namespace(lab, "paged", numerics="fast"),
        "dtype": _namespace(lab, "paged", dtype="float32"),
        "weights": _namespace(lab, "paged", "rtn", dtype="float32"),
        "weights 8": _namespace(lab, "paged", "rtn:bits=8", dtype="float32"),
        "model": _namespace(lab, "paged", family="qwen3"),
    }
    names = list(variants)
    clashes = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if variants[a] == variants[b]]
    assert clashes == []


def test_law_4_the_configuration_is_in_the_key_not_only_the_weights(lab):
    """RoPE, windows and norms shape K and V of the very same tensors."""
    made = require(plan(Recipe.of("paged"), lab._facts("gemma3"), dtype="float64", numerics="pinned"))
    decoder = lab._decoder("gemma3", "float64", "pinned", Recipe(), "cpu")
    codec = build_kv(made, decoder).stores[0].codec
    config = decoder.config
    keys = {namespace(made, decoder, codec, "x")}
    others = [
        {"norm_eps": 1e-5},
        {"attn_softcap": 30.0},
        {"rope": tuple((kind, replace(spec, theta=2 * spec.theta)) for kind, spec in config.rope)},
    ]
    for change in others:
        twin = SimpleNamespace(weights=decoder.weights, config=replace(config, **change))
        keys.add(namespace(made, twin, codec, "x"))
    assert len(keys) == 1 + len(others)


def test_law_4_what_does_not_shape_a_page_is_not(lab):
    base = _namespace(lab, "paged")
    for uses in (("prefix_cache",), ("ngram",), ("chunked_prefill",), ("ngram", "verify:rule=r3")):
        assert _namespace(lab, "paged", *uses) == base


def test_law_4_a_foreign_namespace_never_hits(lab):
    """The same pool under another key: nothing that was cached before is served."""
    engine = lab.make_engine("paged", "prefix_cache", page_size=4, pool=256)
    lab.run_engine(engine, [PROMPT], max_tokens=1)
    assert lab.run_engine(engine, [PROMPT], max_tokens=1).cached() == 20
    own = engine.kv.namespace
    engine.kv.namespace = _namespace(lab, "paged", "kv_int8")
    assert lab.run_engine(engine, [PROMPT], max_tokens=1).cached() == 0
    engine.kv.namespace = own
    assert lab.run_engine(engine, [PROMPT], max_tokens=1).cached() == 20
    assert lab.run_engine(engine, [PROMPT], max_tokens=1, salt="tenant").cached() == 0


def test_law_4_namespaces_are_a_function_of_the_plan(lab):
    made = require(plan(Recipe.of("paged"), lab._facts("llama"), dtype="float64", numerics="pinned"))
    decoder = lab._decoder("llama", "float64", "pinned", Recipe(), "cpu")
    codec = build_kv(made, decoder).stores[0].codec
    assert namespace(made, decoder, codec, "x") == namespace(made, decoder, codec, "x")
    assert namespace(made, decoder, codec, "x") != namespace(made, decoder, codec, "y")
