"""Multi-token prediction in the engine: served as trained, exact output, KV that follows the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.engine import Engine
from workbench.engine.feature_runner import FeatureRunner
from workbench.engine.params import SamplingParams
from workbench.engine.prefix import PrefixIndex
from workbench.engine.scheduler import Batch
from workbench.engine.sequence import Request
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.errors import PlanError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.training.mtp.export import write_weights
from workbench.training.mtp.model import MTPModel, joint_loss, recursive_loss

pytestmark = pytest.mark.usefixtures("inference")

PAGE = 4
TOY = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=48,
    tie_word_embeddings=True,
    initializer_range=0.25,
    max_position_embeddings=256,
)
PROMPTS = [[(3 * i + j * j) % 50 for i in range(5 + 9 * j)] for j in range(4)]


def random_model(modules: int) -> MTPModel:
    """Modules that agree with the model now and then: their layers are its last one."""
    model = MTPModel(TOY, modules, 5).double()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.mtp:
            module.load_state_dict(model.main.model.layers[-1].state_dict(), strict=False)
            module.eh_proj.weight.copy_(torch.cat((torch.zeros(32, 32), torch.eye(32)), 1))
            module.eh_proj.weight.add_(0.05 * torch.randn(32, 64, generator=noise))
    return model


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MTPModel]:
    """A checkpoint with one module."""
    folder, model = tmp_path_factory.mktemp("toy"), random_model(1)
    write_weights(folder, model, torch.float64)
    return folder, model


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MTPModel]:
    """A checkpoint with three."""
    folder, model = tmp_path_factory.mktemp("three"), random_model(3)
    write_weights(folder, model, torch.float64)
    return folder, model


def make_engine(folder: Path, *uses: str, pool: int = 1024, eos: tuple[int, ...] = ()) -> Engine:
    """An engine of a folder's model: float64, pinned."""
    source = open_source(folder)
    facts = ModelFacts(str(folder), source.config, source.fingerprint)
    recipe = Recipe.of("paged", *uses)
    made = require(
        plan(recipe, facts, dtype="float64", numerics="pinned", limits=EngineLimits(pool, 0, 16, 256))
    )
    made = replace(made, page_size=PAGE)
    decoder = Decoder(source.config, build_weights(made, source))
    return build_engine(made, decoder, build_kv(made, decoder), None, eos)


def generate(
    engine: Engine, prompts: list[list[int]], **params: Any
) -> tuple[dict[str, list[int]], list[Any]]:
    """Output ids by request, and the drafts that were judged."""
    settings = {"max_tokens": 16, "ignore_eos": True, **params}
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(**settings)))
    out: dict[str, list[int]] = {}
    drafts = []
    while engine.has_work:
        step, events = engine.step()
        engine.kv.check()
        drafts += step.drafts
        for e in events:
            out.setdefault(f"{e.request_id}.{e.sample}", []).extend(t.id for t in e.tokens)
    assert not any(pool.used for pool in engine.kv.pools)
    return out, drafts


@pytest.mark.parametrize(
    "uses",
    [
        (),
        ("chunked_prefill:budget=16",),
        ("prefix_cache",),
        ("radix_cache",),
        ("kv_int8",),
        ("prefix_cache", "chunked_prefill:budget=16", "kv_fp4"),
    ],
    ids=str,
)
def test_output_is_the_targets(toy, uses):
    expected, _ = generate(make_engine(toy[0], *uses), PROMPTS)
    engine = make_engine(toy[0], "mtp:k=3", *uses)
    for _ in range(2):  # the second time with whatever a prefix index kept
        found, drafts = generate(engine, PROMPTS)
        assert found == expected
        assert any(d.accepted for d in drafts) and any(len(d.accepted) < len(d.tokens) for d in drafts)


def test_output_is_the_targets_whoever_is_preempted(toy):
    prompts = [p[:14] for p in PROMPTS]
    expected, _ = generate(make_engine(toy[0]), prompts, max_tokens=24)
    engine = make_engine(toy[0], "mtp:k=3")
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(max_tokens=24, ignore_eos=True)))
    found: dict[str, list[int]] = {}
    for step in range(400):
        if not engine.has_work:
            break
        if step in (5, 9):
            victim = next(s for s in engine.scheduler.running if s.generated)
            engine.scheduler.preempt(victim, Batch())
            engine.drafting.forget(victim)
        _, events = engine.step()
        engine.kv.check()
        for e in events:
            found.setdefault(f"{e.request_id}.{e.sample}", []).extend(t.id for t in e.tokens)
    assert found == expected


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 7, "seed": 1}]
)
def test_drafts_are_drawn_with_their_law_or_are_the_likeliest(toy, sampling):
    _, drawn = generate(make_engine(toy[0], "mtp:k=2"), PROMPTS, **sampling)
    _, likeliest = generate(make_engine(toy[0], "mtp:k=2,draws=false"), PROMPTS, **sampling)
    assert {d.rule for d in drawn} == {"r2"} and {d.rule for d in likeliest} == {"r3"}


def served(engine: Engine, prompt: list[int], steps: int) -> list[tuple[list[int], int, list[Tensor]]]:
    """(text with its draft, position of the newest committed token, logits of each row) of every draft."""
    found: list[tuple[list[int], int, list[Tensor]]] = []
    drafter = engine.drafting.drafter
    propose, extend = drafter.propose, drafter._extend
    rows: list[Tensor] = []

    def spy_extend(context, logits, *rest):
        rows.append(logits.clone())
        return extend(context, logits, *rest)

    def spy_propose(contexts):
        rows.clear()
        trees = propose(contexts)
        for context, tree in zip(contexts, trees, strict=True):
            text = [*context.tokens, *(tree.tokens if tree else ())]
            found.append((text, len(context.tokens) - 1, list(rows)))
        return trees

    drafter.propose, drafter._extend = spy_propose, spy_extend
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=steps, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    return found


@pytest.mark.parametrize("uses", [(), ("chunked_prefill:budget=16",), ("prefix_cache",)], ids=str)
def test_it_is_served_as_it_was_trained(toy, uses):
    """Every row of every draft has the logits of the training's unrolled passes on the same text.

    (``transformers`` norms and rotates in float32; a row that is off by one differs by more than 1.)
    """
    folder, model = toy
    engine = make_engine(folder, "mtp:k=4", *uses)
    drafts = served(engine, PROMPTS[3], 40)
    assert len(drafts) > 8
    for text, newest, rows in drafts:
        passes = model.recursion(torch.tensor([text]), 4)
        for d, logits in enumerate(rows):
            torch.testing.assert_close(logits, passes.drafts[d][0, newest + d], rtol=0, atol=2e-5)


def chained(model: MTPModel, text: list[int], newest: int) -> list[list[Tensor]]:
    """Streams [H] by row and module, one module and row after another, of a draft behind row ``newest``."""
    embeds, state, rotation = model._main(torch.tensor([text]))
    given: list[list[Tensor]] = [[] for _ in model.mtp]  # by module, what each row was given
    left: list[list[Tensor]] = []
    zero = torch.zeros(TOY.hidden_size).double()
    for row in range(len(text)):
        before = left[-1] if left else [zero] * len(model.mtp)
        first = state[0, row - 1] if 0 < row <= newest else before[-1]
        left.append([])
        for k, (module, so_far) in enumerate(zip(model.mtp, given, strict=True)):
            so_far.append(before[k - 1] if k else first)
            rows = torch.stack([*so_far[1:], zero])[None]  # unroll moves states back by one row
            turned = tuple(r[:, : row + 1] for r in rotation)
            left[-1].append(module.unroll(embeds[:, : row + 1], rows, turned)[0][0, row])
    return left


@pytest.mark.parametrize("uses", [(), ("chunked_prefill:budget=16",), ("prefix_cache",)], ids=str)
def test_several_modules_are_served_as_the_chain_that_was_trained(three, uses):
    """Step j has the logits of module j of the training's chain; from D on the first goes on from it."""
    folder, model = three
    drafts = served(make_engine(folder, "mtp:k=5", *uses), PROMPTS[2], 14)
    assert len(drafts) > 2 and max(len(rows) for *_, rows in drafts) == 5
    for text, newest, rows in drafts:
        chain = model.chain(torch.tensor([text])).drafts
        streams = chained(model, text, newest) if len(rows) > 3 else []
        for j, logits in enumerate(rows):
            if j < 3:
                torch.testing.assert_close(logits, chain[j][0, newest + j], rtol=0, atol=2e-5)
            if streams:
                expected = model.head(model.mtp[j % 3].normed(streams[newest + j][j % 3]))
                torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("uses", [(), ("radix_cache", "chunked_prefill:budget=16", "kv_int8")], ids=str)
def test_output_with_several_modules_is_the_targets(three, uses):
    expected, _ = generate(make_engine(three[0], *uses), PROMPTS)
    engine = make_engine(three[0], "mtp:k=4", *uses)
    for _ in range(2):
        found, drafts = generate(engine, PROMPTS)
        assert found == expected and any(d.accepted for d in drafts)
    assert engine.kv.stores[0].geometry.layers == TOY.num_hidden_layers + 3


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the language a b a b …, trained with its module and for recursion.

    x_{s+1} is x_{s-1}, whose state row s is given together with the embedding of x_s.
    """
    shape = LlamaConfig(
        **{**TOY.to_dict(), "vocab_size": 12, "num_hidden_layers": 1, "initializer_range": 0.1}
    )
    model, gen = MTPModel(shape, 1, 0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(80):
            rows = torch.randint(1, 12, (16, 2), generator=gen).repeat(1, 8)
            loss = joint_loss(model.chain(rows), rows, 1.0)
            loss = loss + recursive_loss(model.recursion(rows, 3), rows, (0.5, 0.5, 0.5), "ce", 0.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("copier")
    write_weights(folder, model, torch.float64)
    return folder


def share_accepted(folder: Path, use: str, **sampling: Any) -> float:
    """Of drafted tokens, on texts a b a b …"""
    prompts = [[a, b, a, b] for a, b in [(1, 5), (7, 2), (11, 3), (4, 10), (9, 6)]]
    out, drafts = generate(make_engine(folder, use), prompts, max_tokens=11, **sampling)
    if not sampling:
        assert all(ids == (prompts[i] * 3)[:11] for i, ids in enumerate(out[f"r{j}.0"] for j in range(5)))
    return sum(len(d.accepted) for d in drafts) / sum(len(d.tokens) for d in drafts)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_in_a_language_that_can_be_known_every_draft_is_accepted(copier, k):
    assert share_accepted(copier, f"mtp:k={k}") == 1.0


def test_a_row_that_is_fed_the_token_of_its_state_is_noticed(copier, monkeypatch):
    """The control of the test before: the embedding is of x_s, while the state is of x_{s-1}."""
    span = FeatureRunner._span

    def late(self, seq, tokens, start, **rest):
        early = seq.tokens[start - 1 : start - 1 + len(tokens)] if start else [0, *tokens[:-1]]
        return span(self, seq, early if len(early) == len(tokens) else tokens, start, **rest)

    monkeypatch.setattr(FeatureRunner, "_span", late)
    assert share_accepted(copier, "mtp:k=1") < 0.5


def test_embedding_and_head_are_the_targets_own(toy):
    engine = make_engine(toy[0], "mtp")
    head, target = engine.drafting.runner.decoder, engine.executor.decoder
    assert head.weights.embed.data_ptr() == target.weights.embed.data_ptr()
    assert head.weights.head is target.weights.head
    held = sum(p.numel() for n, p in toy[1].mtp[0].named_parameters() if "norm" not in n) * 8
    assert held <= engine.drafting.drafter.nbytes() < held + 256 * 32 * 8 * 4


def test_its_rows_follow_the_committed_text(toy):
    """Keys of the module's layer equal those of a fresh prefill: after accepted and rejected drafts."""
    engine = make_engine(toy[0], "mtp:k=3")
    engine.add(Request("a", tuple(PROMPTS[2]), SamplingParams(max_tokens=80, ignore_eos=True)))
    (seq,) = engine.sequences("a")
    for _ in range(18):
        engine.step()
    n, text, store = seq.drafted, list(seq.tokens), engine.kv.stores[0]
    assert n >= 30 and store.geometry.layers == TOY.num_hidden_layers + 1

    def rows(store, seq):
        plane = store.planes["k"][store.geometry.layers - 1][seq.tables[0]]
        return plane.transpose(1, 2).flatten(0, 1)[:n]

    mine = rows(store, seq).clone()
    other = make_engine(toy[0], "mtp:k=3")
    other.add(Request("a", tuple(text), SamplingParams(max_tokens=30, ignore_eos=True)))
    (fresh,) = other.sequences("a")
    other.step()
    other.step()
    assert fresh.drafted >= n
    torch.testing.assert_close(mine, rows(other.kv.stores[0], fresh), rtol=0, atol=1e-12)


def test_a_cached_prefix_is_not_fed_again(toy, monkeypatch):
    engine = make_engine(toy[0], "prefix_cache", "mtp:k=2")
    generate(engine, [PROMPTS[3]])
    fed: list[int] = []
    span = FeatureRunner._span

    def counted(self, seq, tokens, start, **rest):
        fed.append(start)
        return span(self, seq, tokens, start, **rest)

    monkeypatch.setattr(FeatureRunner, "_span", counted)
    generate(engine, [PROMPTS[3]])
    assert min(fed) >= len(PROMPTS[3]) - 1 - PAGE


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
@pytest.mark.parametrize("modules", [1, 3])
def test_drafts_behind_a_cached_prefix_are_those_without_it(toy, three, modules, index):
    """What the model and the modules came out with at the row before comes with the page."""
    folder = (toy if modules == 1 else three)[0]

    def engine():
        return make_engine(folder, index, "mtp:k=4")

    def rows(engine, seq):
        k = engine.kv.stores[0].planes["k"][-modules:, seq.tables[0]]
        return k.transpose(2, 3).flatten(1, 2)

    warm = engine()
    said, _ = generate(warm, [PROMPTS[2]], max_tokens=24)
    for n in range(34, 38):
        prompt, cold = (*(PROMPTS[2] + said["r0.0"])[:n], 7, 7, 7), engine()
        for e in (warm, cold):
            e.add(Request(f"r{n}", prompt, SamplingParams(max_tokens=16, ignore_eos=True)))
        (hit,), (fresh,) = (e.sequences(f"r{n}") for e in (warm, cold))
        drafts: list[list[Any]] = [[], []]
        for _ in range(8):
            for found, e in zip(drafts, (warm, cold), strict=True):
                found += e.step()[0].drafts
            assert hit.tokens == fresh.tokens
            both = min(hit.drafted, fresh.drafted)
            torch.testing.assert_close(
                rows(warm, hit)[:, :both], rows(cold, fresh)[:, :both], rtol=0, atol=1e-12
            )
        assert hit.cached_tokens >= 32 and both > n and drafts[0] == drafts[1] != []
        warm.abort(f"r{n}")


def test_what_is_kept_with_pages_is_counted_and_goes_with_them(three):
    """A page of three modules keeps the model's state and one of each."""
    engine = make_engine(three[0], "prefix_cache", "mtp:k=4", pool=8 * PAGE)
    per_page = 4 * TOY.hidden_size * 8
    for i in range(4):  # pages of the first ones are evicted
        generate(engine, [[i, *PROMPTS[0]]], max_tokens=14)
        index = engine.kv.index
        assert isinstance(index, PrefixIndex)
        assert engine.kv.nbytes(())["kv_meta"] == len(index) * per_page > 0
    engine.kv.forget_prefixes()
    assert engine.kv.nbytes(())["kv_meta"] == 0


def test_a_model_without_a_module_is_told_so(lab: ModuleType):
    with pytest.raises(PlanError, match="no module of multi-token prediction"):
        lab.make_engine("paged", "mtp")
