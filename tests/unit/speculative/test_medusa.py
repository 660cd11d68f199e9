"""Medusa heads: exact output whatever they draft, heads of other models refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from workbench.engine.draft_seams import DraftContext, FeatureDrafter
from workbench.engine.draft_target import TargetDrafter
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.coded_head import decoded, encoded
from workbench.models.heads import find_head, read_head, write_head
from workbench.spec.errors import HeadMismatch, MissingHead, OptionError, PlanError
from workbench.speculative.medusa import Config, MedusaDrafter, head_states
from workbench.training.heads.capture import capture
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.evaluate import rank
from workbench.training.heads.medusa import MedusaHeads, MedusaLoss, Shape, normed
from workbench.training.heads.optimise import Schedule, optimise
from workbench.training.heads.rows import Rows

PAGE = 4
TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache folder of the module's own, where its heads are."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WORKBENCH_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def prompts(lab: ModuleType) -> list[list[int]]:
    return lab.prompts_of(4, seed=2, low=5, high=40)


def answered(lab: ModuleType, family: str, prompts: list[list[int]]) -> list[Rows]:
    """Greedy answers of a random model, with the states that a head is shown."""
    engine = lab.make_engine("paged", family=family)
    ran = lab.run_engine(engine, prompts, max_tokens=TOKENS, ignore_eos=True)
    made = [Conversation((*p, *ran.ids(f"r{i}")), len(p), True) for i, p in enumerate(prompts)]
    decoder = engine.executor.decoder
    layers = decoder.config.num_layers
    streams = capture(decoder, engine.executor.op, [c.ids for c in made], (layers,))
    return [Rows.of(c, s.clone()) for c, (s,) in zip(made, streams, strict=True)]


@pytest.fixture(scope="module")
def heads(lab: ModuleType, cache: Path, prompts: list[list[int]]):
    """Trains a head on half of the prompts, once per family, and leaves it where the technique looks."""
    made: dict[str, MedusaHeads] = {}

    def train(family: str) -> MedusaHeads:
        if family in made:
            return made[family]
        rows = answered(lab, family, prompts[:2])
        source = lab.random_source(family)
        decoder = lab.make_engine("paged", family=family).executor.decoder
        shape = Shape(heads=3, rank=64, vocab=lab.VOCAB, loss="ce")
        model = MedusaHeads(shape, source.config.hidden_size)
        ids = torch.arange(lab.VOCAB)
        loss = MedusaLoss(model, shape, decoder, source.tensor("model.embed_tokens.weight"), ids, rows)
        schedule = Schedule(
            steps=150, batch=2, lr=1e-2, clip=10.0, decay=0.0, save_every=1000, look_every=1000
        )
        optimise(model, loss, len(rows), schedule, cache / family / "run", "key", lambda: {})
        found = rank(lambda s: loss.likeliest(normed(decoder, s), 6), rows, 3)
        paths = found.paths(24)[0]
        paths += [p for p in ([1], [2], [3], [1, 0], [0, 1], [0, 0, 1]) if p not in paths]
        tensors = {"down": model.down.detach(), "up": model.up.detach(), "ids": ids.to(torch.int32)}
        path = cache / "heads" / f"random-{family}" / "medusa.safetensors"
        write_head(path, "medusa", source.fingerprint, {"heads": 3, "paths": paths}, tensors)
        made[family] = model
        return model

    return train


def generate(lab: ModuleType, engine, prompts, **params):
    settings = {"max_tokens": TOKENS, "ignore_eos": True, **params}
    ran = lab.run_engine(engine, prompts, **settings)
    engine.kv.check()
    drafts = [d for s in ran.steps for d in s.drafts]
    n = settings.get("n", 1)
    return [ran.ids(f"r{i}", s) for i in range(len(prompts)) for s in range(n)], drafts


USES = [
    (),
    ("chunked_prefill:budget=16",),
    ("prefix_cache",),
    ("radix_cache",),
    ("kv_int8",),
    ("kv_fp4",),
    ("goodput",),
]


@pytest.mark.parametrize("uses", USES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_spd_01_output_is_the_targets(lab, heads, prompts, uses, family):
    heads(family)
    plain = [u for u in uses if u != "goodput"]
    expected, _ = generate(lab, lab.make_engine("paged", *plain, page_size=PAGE, family=family), prompts)
    engine = lab.make_engine("paged", "medusa:nodes=12", *uses, page_size=PAGE, family=family)
    for _ in range(2):  # the second time with whatever a prefix index kept
        found, drafts = generate(lab, engine, prompts)
        assert found == expected
        assert any(len(d.accepted) >= 2 for d in drafts)
        assert any(not d.accepted for d in drafts)
        assert {d.rule for d in drafts} == {"r1"}


def test_pages_that_are_coded_whole(lab, heads, prompts):
    heads("llama")
    expected, _ = generate(lab, lab.make_engine("paged", "kivi:residual=32"), prompts)
    found, drafts = generate(lab, lab.make_engine("paged", "kivi:residual=32", "medusa"), prompts)
    assert found == expected and any(d.accepted for d in drafts)


@pytest.mark.parametrize("rule", ["auto", "r3", "r4"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"temperature": 1.2, "top_k": 7}], ids=str)
def test_a_seeded_run_says_what_the_plain_run_says(lab, heads, prompts, rule, sampling):
    heads("llama")
    expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts, seed=5, **sampling)
    engine = lab.make_engine("paged", "medusa:nodes=12", f"verify:rule={rule}", page_size=PAGE)
    found, drafts = generate(lab, engine, prompts, seed=5, **sampling)
    assert found == expected
    assert {d.rule for d in drafts} == {"r3" if rule == "auto" else rule}


def test_a_chain_is_the_heads_first_choices(lab, heads, prompts):
    heads("llama")
    _, drafts = generate(lab, lab.make_engine("paged", "medusa:branches=false", page_size=PAGE), prompts)
    assert max(len(d.tokens) for d in drafts) == 3
    assert all(d.parents == tuple(range(-1, len(d.tokens) - 1)) for d in drafts)


def test_spd_21_text_learnt_by_heart_is_drafted_from_the_first_position(lab, heads, prompts):
    """Acceptance right behind the prompt is whole, and there are as many targets as a head has answers."""
    heads("llama")
    engine = lab.make_engine("paged", "medusa:branches=false", page_size=PAGE)
    for prompt in prompts[:2]:
        _, drafts = generate(lab, engine, [prompt])
        assert all(len(d.accepted) == len(d.tokens) for d in drafts)
        assert len(drafts[0].tokens) == 3
    from workbench.training.heads.rows import targets

    rows = answered(lab, "llama", prompts[:1])
    wanted = targets(rows, 3)
    assert (wanted >= 0).sum(0).tolist() == [TOKENS - 1, TOKENS - 2, TOKENS - 3]
    answer = rows[0].conversation.ids[rows[0].conversation.answer :]
    assert wanted[0].tolist() == list(answer[1:4])  # the engine has the first token itself


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_spd_07_a_tree_larger_than_its_room_is_cut(lab, heads, prompts, max_tokens):
    heads("llama")
    expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts, max_tokens=max_tokens)
    engine = lab.make_engine("paged", "medusa:nodes=24", page_size=PAGE)
    found, drafts = generate(lab, engine, prompts, max_tokens=max_tokens)
    assert found == expected and all(len(ids) == max_tokens for ids in found)
    assert all(len(d.tokens) <= max_tokens - 2 for d in drafts)


def test_spd_04_an_end_token_inside_a_draft_ends_the_request(lab, heads, prompts):
    heads("llama")
    whole, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts[:2])
    inside = 0
    for prompt, ids in zip(prompts, whole, strict=False):
        for eos in dict.fromkeys(ids):
            engine = lab.make_engine("paged", "medusa:nodes=12", page_size=PAGE, eos_ids=(eos,))
            found, drafts = generate(lab, engine, [prompt], ignore_eos=False)
            assert found == [ids[: ids.index(eos) + 1]]
            inside += any(d.tokens[i] == eos for d in drafts for i in d.accepted)
    assert inside


@pytest.mark.parametrize("vocab", [1, 2, 9, 40, 61])
def test_fewer_tokens_to_draft_from_change_drafts_only(lab, heads, prompts, vocab):
    heads("llama")
    expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts)
    engine = lab.make_engine("paged", f"medusa:nodes=12,vocab={vocab}", page_size=PAGE)
    found, drafts = generate(lab, engine, prompts)
    assert found == expected
    assert all(t < vocab for d in drafts for t in d.tokens)
    rows = engine.drafting.drafter._rows
    assert rows.numel() == (vocab * 64 if vocab < 61 else 0)


def test_samples_and_preemption(lab, heads, prompts):
    heads("llama")
    plain, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts)
    engine = lab.make_engine("paged", "medusa:nodes=12", page_size=PAGE)
    lab.preempt_at(engine, {3, 6, 7}.__contains__)
    found, _ = generate(lab, engine, prompts)
    assert found == plain
    sampled = {"n": 3, "temperature": 1.0, "seed": 3}
    expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts[:1], **sampled)
    found, drafts = generate(lab, lab.make_engine("paged", "medusa", page_size=PAGE), prompts[:1], **sampled)
    assert found == expected and drafts
    assert not engine.drafting.drafter._seen


def test_it_drafts_from_the_state_before_the_root(lab, heads):
    """Gate SPD-16: of any other position it does not draft at all."""
    heads("llama")
    engine = lab.make_engine("paged", "medusa:nodes=6", page_size=PAGE)
    drafter = engine.drafting.drafter
    assert isinstance(drafter, FeatureDrafter) and isinstance(drafter, TargetDrafter)
    drafter.observe(7, 0, [torch.randn(9, 64, dtype=torch.float64)])
    behind = [DraftContext(7, [1] * n, 6, True) for n in (9, 10, 11)]
    assert [t is not None for t in drafter.propose(behind)] == [False, True, False]
    unknown = DraftContext(8, [1] * 10, 6, True)
    assert drafter.propose([unknown]) == [None]
    drafter.forget(7)


def test_a_new_head_says_what_the_model_says():
    gen = torch.Generator().manual_seed(0)
    z = torch.randn(5, 8, generator=gen)
    model = MedusaHeads(Shape(heads=2), 8)
    assert torch.equal(model(z), z[:, None].expand(5, 2, 8))
    down, up = torch.randn(2, 3, 8, generator=gen), torch.randn(2, 8, 3, generator=gen)
    found = head_states(z, down, up)
    for k in range(2):
        inner = z @ down[k].T
        wanted = z + (inner * torch.sigmoid(inner)) @ up[k].T
        torch.testing.assert_close(found[:, k], wanted)


def rewritten(cache: Path, name: str, fingerprint: str = "", facts=None, **tensors) -> Path:
    """A copy of the trained head with something changed."""
    head = read_head(cache / "heads" / "random-llama" / "medusa.safetensors")
    path = cache / "heads" / name / "medusa.safetensors"
    write_head(
        path,
        "medusa",
        fingerprint or head.fingerprint,
        {**head.facts, **(facts or {})},
        {**head.tensors(), **tensors},
    )
    return path


def test_a_missing_head_is_a_conflict_with_the_command_that_trains_it(lab):
    with pytest.raises(
        PlanError, match=r"no medusa head for random-qwen2.*workbench train medusa --target random-qwen2"
    ):
        lab.make_engine("paged", "medusa", family="qwen2")
    with pytest.raises(MissingHead):
        find_head("nothing", "medusa", "")


def test_a_head_of_another_model_is_refused(lab, heads, cache):
    heads("llama")
    rewritten(cache, "random-qwen3", "0" * 64)
    with pytest.raises(PlanError, match="trained for other weights"):
        lab.make_engine("paged", "medusa", family="qwen3")
    decoder = lab.make_engine("paged").executor.decoder
    other = MedusaDrafter(Config(), find_head("random-qwen3", "medusa", ""), 2)
    with pytest.raises(HeadMismatch, match="other weights"):
        other.attach_target(decoder)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"ids": torch.tensor([3, 61], dtype=torch.int32)}, "drafts token 61; the model has 61"),
        ({"ids": torch.tensor([-1], dtype=torch.int32)}, "drafts token"),
        ({"down": torch.zeros(3, 8, 32), "up": torch.zeros(3, 32, 8)}, "32 dimensions; the model has 64"),
        ({"up": torch.full((3, 64, 64), float("nan"))}, "not finite"),
        ({"down": torch.zeros(1, 64, 64), "up": torch.zeros(1, 64, 64)}, "fewer heads"),
    ],
)
def test_spd_10_a_head_that_does_not_fit_is_refused(lab, heads, cache, change, told):
    heads("llama")
    rewritten(cache, "broken", **change)
    decoder = lab.make_engine("paged").executor.decoder
    with pytest.raises(HeadMismatch, match=told):
        MedusaDrafter(Config(), find_head("broken", "medusa", ""), 2).attach_target(decoder)


@pytest.mark.parametrize("paths", [[], [[0], [1, 0]], [[0], [0]], [[-1]], "x", None, [[0], [0, 5000]]])
def test_a_tree_that_is_none_is_refused(heads, cache, paths):
    heads("llama")
    rewritten(cache, "broken", facts={"paths": paths})
    with pytest.raises(HeadMismatch, match="has no tree"):
        MedusaDrafter(Config(), find_head("broken", "medusa", ""), 2)


def test_rows_of_an_untied_head_are_not_taken_from_the_embedding(lab, cache):
    from dataclasses import replace

    from workbench.core.binding import BindContext
    from workbench.speculative.medusa import bind

    config = replace(lab.random_source().config, tie_embeddings=False)
    context = BindContext(config, torch.float64, "pinned", torch.device("cpu"), 16, model="x")
    path = cache / "heads" / "x" / "medusa.safetensors"
    one = {"ids": torch.arange(1, dtype=torch.int32)}
    write_head(path, "medusa", context.fingerprint, {"heads": 1, "paths": [[0]]}, one)
    with pytest.raises(OptionError, match="head of its own"):
        bind(Config(vocab=8), context)
    write_head(path, "medusa", context.fingerprint, {"heads": 1, "paths": [[0]], "own_rows": 8}, one)
    assert bind(Config(vocab=8), context).max_draft == 1


@pytest.mark.parametrize("vocab", [0, 11])
def test_heads_with_rows_of_their_own_draft_from_them(lab, heads, prompts, cache, vocab):
    """Head k drafts what its own rows find likeliest of the tokens listed; the file holds eight bits."""
    heads("llama")
    path = cache / "heads" / "random-llama" / "medusa.safetensors"
    tied = read_head(path)
    before = tied.tensors()
    gen = torch.Generator().manual_seed(3)
    ids = torch.randperm(lab.VOCAB, generator=gen)[:20]
    matrix = lab.random_source("llama").tensor("model.embed_tokens.weight")[ids].float()
    rows = matrix + torch.randn(3, *matrix.shape, generator=gen) * matrix.std()
    stored = encoded({**{n: before[n].float() for n in ("down", "up")}, "rows": rows})
    assert stored["rows"].dtype == torch.int8 and stored["rows.step"].shape == (3, 20)
    try:
        facts = {**tied.facts, "own_rows": 20}
        write_head(path, "medusa", tied.fingerprint, facts, {**stored, "ids": ids.to(torch.int32)})
        engine = lab.make_engine("paged", f"medusa:branches=false,vocab={vocab}", page_size=PAGE)
        expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts)
        found, drafts = generate(lab, engine, prompts)
        assert found == expected and drafts
        drafter = engine.drafting.drafter
        drafter.observe(7, 0, [torch.randn(9, 64, dtype=torch.float64, generator=gen)])
        (tree,) = drafter.propose([DraftContext(7, [1] * 10, 6, True)])
        read = decoded(stored)
        z = engine.executor.decoder.final_norm(drafter._seen[7][1][None])
        states = head_states(z, read["down"].double(), read["up"].double())
        limit = vocab or 20
        wanted = [int(ids[(read["rows"][k, :limit].double() @ states[0, k]).argmax()]) for k in range(3)]
        assert list(tree.tokens) == wanted
        whole = drafter.nbytes()
        rounded = lab.make_engine("paged", f"medusa:branches=false,bits=8,vocab={vocab}", page_size=PAGE)
        assert generate(lab, rounded, prompts)[0] == expected
        assert rounded.drafting.drafter.nbytes() < whole
        short = {**stored, "ids": ids[:9].to(torch.int32)}
        write_head(path, "medusa", tied.fingerprint, facts, short)
        with pytest.raises(HeadMismatch, match="own rows"):
            lab.make_engine("paged", "medusa", page_size=PAGE)
    finally:
        write_head(path, "medusa", tied.fingerprint, tied.facts, before)


def test_memory_counts_heads_and_states(lab, heads, prompts):
    heads("llama")
    engine = lab.make_engine("paged", "medusa:nodes=4,vocab=10", page_size=PAGE)
    used = engine.drafting.drafter._down.shape[0]
    fixed = 2 * used * 64 * 64 * 8 + 10 * 64 * 8 + 10 * 8
    assert engine.memory()["draft"] == fixed
    engine.add(Request("a", tuple(prompts[0]), SamplingParams(max_tokens=8, ignore_eos=True)))
    with torch.inference_mode():
        engine.step()
    assert engine.memory()["draft"] == fixed + 64 * 8
