"""EAGLE heads: exact output whatever they draft, drafts of a float64 oracle, KV that follows the pages."""

from __future__ import annotations

from functools import cache as memoised
from pathlib import Path
from types import ModuleType

import pytest
import torch

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import PlanError

PAGE = 4
TOKENS = 16
CHAIN = "eagle3:depth=3,vocab=0"
TREE = "eagle3:depth=3,width=4,nodes=14,vocab=0"
CHAIN_1 = "eagle:tree=chain,depth=3,vocab=0"
STATIC = "eagle:tree=static,vocab=0"
DYNAMIC = "eagle:depth=3,width=4,nodes=14,vocab=0"
FAST = "fasteagle:vocab=0"
LEAVES = "fasteagle:width=5,vocab=0"
CHAINS, TREES = (CHAIN, CHAIN_1, FAST), (TREE, STATIC, DYNAMIC, LEAVES)
FEATURES = {"eagle3": [0, 1, 2], "eagle": [2], "fasteagle": [0, 1, 2]}
LAYERS = {"eagle3": 1, "eagle": 1, "fasteagle": 3}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache folder of the module's own, where its heads are."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WORKBENCH_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def head(lab: ModuleType, random_heads: ModuleType, cache: Path):
    """Puts random heads where the techniques look, and gives the oracle of one."""

    def made(family: str = "llama", drafter: str = CHAIN):
        source = lab.random_source(family)
        oracles = {}
        for kind, features in FEATURES.items():
            tensors = getattr(random_heads, kind)(source.config)
            random_heads.put(
                cache,
                f"random-{family}",
                kind,
                source.fingerprint,
                tensors,
                features=features,
                layers=LAYERS[kind],
            )
            matrices = (source.tensor(f"model.{n}.weight") for n in ("embed_tokens", "norm"))
            oracles[kind] = random_heads.Oracle(kind, source.config, tensors, *matrices)
        return oracles[drafter.partition(":")[0]]

    return made


@pytest.fixture(scope="module")
def prompts(lab: ModuleType) -> list[list[int]]:
    return lab.prompts_of(4, seed=2, low=5, high=40)


def generate(lab: ModuleType, engine, prompts, **params):
    settings = {"max_tokens": TOKENS, "ignore_eos": True, **params}
    ran = lab.run_engine(engine, prompts, **settings)
    engine.kv.check()
    drafts = [d for s in ran.steps for d in s.drafts]
    return [ran.ids(f"r{i}", s) for i in range(len(prompts)) for s in range(settings.get("n", 1))], drafts


USES = [
    (),
    ("chunked_prefill:budget=16",),
    ("prefix_cache",),
    ("radix_cache",),
    ("kv_int8",),
    ("kv_fp4",),
    ("goodput",),
]


@pytest.fixture(scope="module")
def plain(lab: ModuleType, prompts):
    """What an engine without a drafter says to the prompts: ``plain(*uses, family=..., **params)``."""

    @memoised
    def said(*uses, family="llama", **params):
        return generate(
            lab, lab.make_engine("paged", *uses, page_size=PAGE, family=family), prompts, **params
        )[0]

    return said


@pytest.mark.parametrize("drafter", [*CHAINS, *TREES])
@pytest.mark.parametrize("uses", USES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_output_is_the_targets(lab, head, prompts, plain, uses, drafter, family):
    head(family)
    expected = plain(*(u for u in uses if u != "goodput"), family=family)
    engine = lab.make_engine("paged", drafter, *uses, page_size=PAGE, family=family)
    for _ in range(2):  # the second time with whatever a prefix index kept
        found, drafts = generate(lab, engine, prompts)
        assert found == expected
        if "goodput" in uses:
            continue  # it soon finds that a random head is not worth its time
        assert {d.rule for d in drafts} == {"r1"} and any(not d.accepted for d in drafts)
        assert family == "gemma3" or drafter in CHAINS or any(d.accepted for d in drafts)


def test_pages_that_are_coded_whole(lab, head, prompts):
    head()
    expected, _ = generate(lab, lab.make_engine("paged", "kivi:residual=32"), prompts)
    for drafter in (*CHAINS, *TREES):
        found, drafts = generate(lab, lab.make_engine("paged", "kivi:residual=32", drafter), prompts)
        assert found == expected and drafts


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"temperature": 1.2, "top_k": 7}], ids=str)
def test_a_seeded_run_says_what_the_plain_run_says(lab, head, prompts, plain, sampling):
    head()
    params = {"seed": 5, **sampling}
    expected = plain(**params)
    for drafter in (TREE, DYNAMIC, LEAVES, "eagle:tree=static,draws=false"):
        found, drafts = generate(lab, lab.make_engine("paged", drafter, page_size=PAGE), prompts, **params)
        assert found == expected and {d.rule for d in drafts} == {"r3"}
    for drafter, rule in ((CHAIN, "r2"), (CHAIN_1, "r2"), (FAST, "r2"), (STATIC, "r6")):
        matched = lab.make_engine("paged", drafter, "verify:rule=r4", page_size=PAGE)
        assert generate(lab, matched, prompts, **params)[0] == expected
        _, drafts = generate(lab, lab.make_engine("paged", drafter, page_size=PAGE), prompts, **params)
        assert rule in {d.rule for d in drafts} <= {rule, "r2"}  # r2: where no sibling was possible


@pytest.mark.parametrize("budget", [0, 3, 16])
@pytest.mark.parametrize("drafter", [CHAIN, CHAIN_1])
def test_a_chain_is_the_oracles_whatever_the_chunks(lab, head, random_heads, prompts, drafter, budget):
    """Position by position: true states of committed tokens, its own of drafted ones."""
    oracle = head("llama", drafter)
    chunks = [f"chunked_prefill:budget={budget}"] if budget else []
    engine = lab.make_engine("paged", drafter, *chunks, page_size=PAGE)
    fresh, seen = lab.make_engine("paged", page_size=PAGE), 0
    for prompt in prompts[:3]:
        ran = lab.run_engine(engine, [prompt], max_tokens=8, ignore_eos=True)
        ids = [*prompt, *ran.ids("r0")]
        known = len(prompt)
        for step in ran.steps:
            for d in step.drafts:
                assert list(d.tokens) == random_heads.oracle_chain(oracle, fresh, ids[:known], len(d.tokens))
                seen += len(d.tokens)
            known += sum(len(e.tokens) for e in ran.events if e.step == step.step)
    assert seen >= 3 * 4


@pytest.mark.parametrize("drafter", [TREE, DYNAMIC])
def test_a_tree_is_the_one_that_brute_force_grows(lab, head, random_heads, prompts, drafter):
    oracle = head("llama", drafter)
    engine = lab.make_engine("paged", drafter, page_size=PAGE)
    fresh = lab.make_engine("paged", page_size=PAGE)
    prompt = prompts[1]
    ran = lab.run_engine(engine, [prompt], max_tokens=24, ignore_eos=True)
    ids, known, seen = [*prompt, *ran.ids("r0")], len(prompt), 0
    for step in ran.steps:
        for d in step.drafts:
            if len(d.tokens) < 14:
                continue  # near the end there is less room
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(d.tokens, d.parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert set(paths) == random_heads.oracle_tree(oracle, fresh, ids[:known], 3, 4, 14)
            seen += 1
        known += sum(len(e.tokens) for e in ran.events if e.step == step.step)
    assert seen > 3


def drafter_rows(engine, seq, local=0):
    """K of a layer of the drafter's, for the tokens whose rows it holds for good."""
    store, table = engine.kv.stores[0], seq.tables[0]
    layer = engine.executor.decoder.config.num_layers + local
    slots = torch.tensor([table[i // PAGE] * PAGE + i % PAGE for i in range(seq.drafted)])
    k = store.planes["k"][layer]  # [pages, Hkv, P, D]
    return k.transpose(1, 2).flatten(0, 1)[slots]


@pytest.mark.parametrize("drafter", [*CHAINS, *TREES])
def test_kv_after_every_round_is_that_of_a_fresh_pass(lab, head, prompts, drafter):
    """Gate G6: no row of a draft stays, accepted or not; accepted tokens are fed again with true states."""
    head()
    kind = drafter.partition(":")[0]
    plainer = {"eagle": CHAIN_1, "eagle3": CHAIN, "fasteagle": FAST}[kind]
    engine = lab.make_engine("paged", drafter, page_size=PAGE)
    for name, prompt in enumerate(prompts[:2]):
        engine.add(Request(f"a{name}", tuple(prompt), SamplingParams(max_tokens=20, ignore_eos=True)))
    checked = 0
    while engine.has_work:
        engine.step()
        for name in list(engine.alive()):
            (seq,) = engine.sequences(name)
            if seq.n_generated < 2 or not seq.drafted:
                continue
            other = lab.make_engine("paged", plainer, page_size=PAGE)
            other.add(Request("b", tuple(seq.tokens), SamplingParams(max_tokens=12, ignore_eos=True)))
            other.step(), other.step()
            (fresh,) = other.sequences("b")
            n = min(seq.drafted, fresh.drafted)
            assert n >= len(seq.tokens) - 5
            for layer in range(LAYERS[kind]):
                rows = (drafter_rows(e, s, layer)[:n] for e, s in ((engine, seq), (other, fresh)))
                assert torch.equal(*rows)
            checked += 1
    assert checked > 4


@pytest.mark.parametrize(
    ("family", "uses"),
    [
        *[("llama", (i, d)) for i in ("prefix_cache", "radix_cache") for d in (CHAIN, CHAIN_1, LEAVES, TREE)],
        ("llama", ("prefix_cache", CHAIN, "fused_round")),
        ("llama", ("prefix_cache", CHAIN, "kivi:residual=32")),
        ("gemma3", ("prefix_cache", CHAIN)),
        ("gemma3", ("radix_cache", CHAIN)),
    ],
    ids=str,
)
def test_drafts_behind_a_cached_prefix_are_those_without_it(lab, head, prompts, family, uses):
    """Drafts, what is accepted, and the drafter's own rows: the state before the first row comes with the
    page, or is computed again where the prefix ends within one. A prefix may be part of an answer."""
    head(family)
    coded = "kivi:residual=32" in uses

    def engine():
        return lab.make_engine("paged", *uses, page_size=32 if coded else PAGE, family=family)

    def rows(engine, seq):
        runner = engine.drafting.runner
        table, store = seq.tables[runner._group], engine.kv.stores[runner._group]
        own = engine.drafting.drafter.kv_layers
        return store.planes["k"][-own:, table].transpose(2, 3).flatten(1, 2)

    warm, text = engine(), prompts[0]
    (said,), _ = generate(lab, warm, [text], max_tokens=48)
    for n in range(34, 38):
        prompt, cold = (*(text + said)[:n], 7, 7, 7), engine()
        for e in (warm, cold):
            e.add(Request(f"r{n}", prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True)))
        (hit,), (fresh,) = (e.sequences(f"r{n}") for e in (warm, cold))
        drafts = [[], []]
        for _ in range(8):
            for found, e in zip(drafts, (warm, cold), strict=True):
                found += [(d.tokens, d.parents, d.accepted) for d in e.step()[0].drafts]
            assert coded or hit.tokens == fresh.tokens  # blocks that end with a page take a step more
            both = min(hit.drafted, fresh.drafted)
            assert coded or torch.equal(rows(warm, hit)[:, :both], rows(cold, fresh)[:, :both])
        rounds = min(map(len, drafts))
        assert hit.cached_tokens >= 32 and both > n and rounds > 3
        assert drafts[0][:rounds] == drafts[1][:rounds]
        warm.abort(f"r{n}")
    warm.kv.check()


def test_samples_preemption_and_odd_room(lab, head, prompts, plain):
    head()
    sampled = {"n": 3, "temperature": 1.0, "seed": 3}
    expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts[:1], **sampled)
    for drafter in (*CHAINS, *TREES):
        engine = lab.make_engine("paged", drafter, page_size=PAGE)
        step = engine.step
        lab.preempt_at(engine, {3, 6, 7}.__contains__)
        assert generate(lab, engine, prompts)[0] == plain()
        engine.step = step
        matched = lab.make_engine("paged", drafter, "verify:rule=r4", page_size=PAGE)
        assert generate(lab, matched, prompts[:1], **sampled)[0] == expected
        for max_tokens in (1, 2, 3, 5):
            found, _ = generate(lab, engine, prompts, max_tokens=max_tokens)
            assert found == plain(max_tokens=max_tokens)
        assert not engine.drafting.runner._shown and not engine.drafting.runner._fed


@pytest.mark.parametrize("vocab", [1, 2, 9, 40])
def test_fewer_tokens_to_draft_from(lab, head, prompts, plain, vocab):
    oracle = head()
    allowed = set(oracle.t["ids"][:vocab].tolist())
    for form in ("depth=3", "depth=3,width=4,nodes=14"):
        engine = lab.make_engine("paged", f"eagle3:{form},vocab={vocab}", page_size=PAGE)
        found, drafts = generate(lab, engine, prompts)
        assert found == plain() and drafts
        drafts += generate(lab, engine, prompts, temperature=1.0, seed=1)[1]
        drafts += generate(lab, engine, prompts, repetition_penalty=1.3)[1]
        assert all(t in allowed for d in drafts for t in d.tokens)


def test_a_head_that_does_not_fit_is_refused(lab, head, random_heads, cache, prompts):
    head()
    source = lab.random_source("llama")
    tensors = random_heads.eagle3(source.config)
    for change, told in (
        ({"fuse.weight": torch.zeros(64, 100)}, "fuse.weight of the head"),
        ({"layers.0.mlp.up_proj.weight": torch.zeros(3, 3)}, "up_proj.weight of the head"),
        ({"norm.weight": torch.full((64,), float("nan"))}, "not finite"),
        ({"ids": torch.tensor([70], dtype=torch.int32)}, "tokens that the model has not"),
    ):
        random_heads.put(
            cache,
            "random-llama",
            "eagle3",
            source.fingerprint,
            {**tensors, **change},
            features=FEATURES["eagle3"],
        )
        with pytest.raises(Exception, match=told) as caught:
            lab.make_engine("paged", "eagle3:vocab=1", page_size=PAGE)
        assert caught.type.__name__ == "HeadMismatch"
    for features in ([0, 1], [0, 1, 9], "x", None):
        random_heads.put(cache, "random-llama", "eagle3", source.fingerprint, tensors, features=features)
        with pytest.raises(PlanError, match="reads the layers"):
            lab.make_engine("paged", "eagle3", page_size=PAGE)
    head()


def test_the_static_tree_is_eagles(lab, head, prompts):
    """25 nodes, 4 8 8 3 2 per level, the likelier branches deeper; siblings by likelihood."""
    head()
    engine = lab.make_engine("paged", STATIC, page_size=PAGE)
    _, drafts = generate(lab, engine, prompts[:1], max_tokens=40)
    whole = [d for d in drafts if len(d.tokens) == 25]
    assert whole
    for d in whole:
        depths: list[int] = []
        for parent in d.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert [depths.count(n) for n in range(1, 6)] == [4, 8, 8, 3, 2]
        siblings = [[c for c, q in zip(d.chances, d.parents, strict=True) if q == p] for p in set(d.parents)]
        assert all(chances == sorted(chances, reverse=True) for chances in siblings)


@pytest.mark.parametrize("drafter", [FAST, LEAVES])
def test_a_cascade_drafts_all_positions_in_one_pass(lab, head, random_heads, prompts, drafter):
    """Its laws are the oracle's and do not depend on what it drafts; side leaves hang on the backbone."""
    oracle = head("llama", drafter)
    engine = lab.make_engine("paged", drafter, page_size=PAGE)
    fresh = lab.make_engine("paged", page_size=PAGE)
    width = engine.drafting.drafter.width
    for prompt in prompts[:2]:
        ran = lab.run_engine(engine, [prompt], max_tokens=20, ignore_eos=True)
        ids, known = [*prompt, *ran.ids("r0")], len(prompt)
        for step in ran.steps:
            for d in step.drafts:
                laws = oracle.cascade(ids[:known], random_heads.states_of(oracle, fresh, ids[:known]))
                best = [law.topk(width).indices.tolist() for law in laws]
                wanted = [t for level in best for t in level]
                assert list(d.tokens) == wanted[: len(d.tokens)]
                assert all(p < 0 or p % width == 0 for p in d.parents)
                assert len(d.tokens) == 3 * width or known + 20 > len(ids)
            known += sum(len(e.tokens) for e in ran.events if e.step == step.step)
    drafting = [s for s in ran.steps if s.drafts]
    assert engine.drafting.drafter.passes >= len(drafting) > 0
    before = engine.drafting.drafter.passes
    again = lab.run_engine(engine, prompts[:3], max_tokens=6, ignore_eos=True)
    rounds = sum(bool(s.drafts) for s in again.steps)
    assert engine.drafting.drafter.passes - before == rounds  # one for all sequences of a step


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("drafter", ["eagle3:depth=3", "eagle:tree=static", "fasteagle:width=3"])
def test_a_rounded_head_drafts_a_little_else_and_changes_nothing(lab, head, prompts, plain, drafter, bits):
    """Rounded weights are not those of 16 bits, near them, and the output stays the target's."""
    head()
    engine = lab.make_engine("paged", f"{drafter},vocab=0,bits={bits}", page_size=PAGE)
    whole = lab.make_engine("paged", f"{drafter},vocab=0", page_size=PAGE)
    found, _ = generate(lab, engine, prompts)
    assert found == plain()
    linears = [e.drafting.runner.decoder.weights.layers[0].o for e in (engine, whole)]
    x = torch.randn(5, linears[0].k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded, exact = (linear(x) for linear in linears)
    assert not torch.equal(rounded, exact)
    error = float((rounded - exact).norm() / exact.norm())
    assert error < (0.02 if bits == 8 else 0.3)


@pytest.mark.parametrize("drafter", ["eagle3:depth=3", "eagle:tree=chain,depth=3", "fasteagle:width=1"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 2}], ids=str)
def test_a_chain_ends_where_it_is_not_trusted(lab, head, prompts, drafter, sampling):
    """As long as all before its last token were trusted; output, and the law of what is drawn, stay."""
    head()
    whole = generate(lab, lab.make_engine("paged", f"{drafter},vocab=0", page_size=PAGE), prompts, **sampling)
    engine = lab.make_engine("paged", f"{drafter},vocab=0,confidence=0.2", page_size=PAGE)
    found, drafts = generate(lab, engine, prompts, **sampling)
    assert sampling or found == whole[0]
    lengths = {len(d.tokens) for d in drafts}
    assert 1 in lengths and len(lengths) > 1
    if not sampling:
        return
    for d in drafts:
        chances = torch.tensor(d.chances).cumprod(0)
        assert bool((chances[:-1] >= 0.2).all())
        assert len(d.tokens) == 3 or float(chances[-1]) < 0.2 or d.emitted < len(d.tokens) + 1
