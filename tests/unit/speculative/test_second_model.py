"""A second model as drafter: exact with any vocabulary, right where it is the target, its bytes counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from workbench.core.session import Session
from workbench.engine.draft_seams import DraftTree
from workbench.models.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.errors import OptionError, PlanError
from workbench.spec.recipe import Recipe
from workbench.speculative import exact_law, rules
from workbench.speculative.second_model import SecondModel
from workbench.speculative.vocabularies import Vocabularies, spellings

TEXT = "def area(width, height): return width * height # the list of all areas, in the order they came "
PROMPTS = ["def area(width, height):", "The list of all the areas", "one two three one two"]
UNKNOWN = {"unk_token": "<unk>"}
SAMPLING = {"temperature": 0.9, "seed": 4}


def backend(kind: str) -> Backend:
    """A small tokenizer of another make than the target's byte-level BPE."""
    if kind == "bytes":  # the same make, other merges
        made = Backend(models.BPE())
        made.pre_tokenizer, made.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "sentences":
        made = Backend(models.BPE(byte_fallback=True, **UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = sorted(set(TEXT))
    else:
        made = Backend(models.WordLevel({"§§": 0, "¶¶": 1, "<unk>": 2}, **UNKNOWN))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        return made
    special = ["<unk>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    return made


@pytest.fixture(scope="module")
def other(lab, tmp_path_factory):
    """Folders of random models whose tokenizer is one of the above: ``other("bytes")``."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            tokens = tmp_path_factory.mktemp("tokenizers") / kind
            tokens.mkdir()
            own = backend(kind)
            own.save(str(tokens / "tokenizer.json"))
            (tokens / "tokenizer_config.json").write_text(
                json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **UNKNOWN})
            )
            (tokens / "config.json").write_text(json.dumps({"vocab_size": own.get_vocab_size()}))
            made[kind] = lab.write_folder(tokens.with_name(f"model-{kind}"), "qwen3", tokens)
        return made[kind]

    return folder


def ran(session: Session, *uses: str, **sampling):
    """Ids of the prompts together, and what became of drafts."""
    session.apply(Recipe.of("paged", *uses)).result()
    runs = [session.generate(p, max_tokens=10, ignore_eos=True, **sampling) for p in PROMPTS]
    return [r.token_ids for r in runs], runs


@pytest.fixture(scope="module")
def session(model_folder):
    with Session(str(model_folder("llama")), dtype="float64", numerics="pinned") as opened:
        yield opened


@pytest.mark.parametrize("kind", ["bytes", "sentences"])
@pytest.mark.parametrize("across", ["shared", "text"])
def test_output_is_the_targets_whatever_the_draft_model_speaks(kind, across, other, session):
    plain, _ = ran(session)
    use = f"draft_model:model={other(kind)},across={across},k=3"
    drafted, runs = ran(session, use)
    assert drafted == plain
    assert all(r.acceptance["drafted"] for r in runs)
    _, sampled = ran(session, use, **SAMPLING)
    assert all(r.acceptance["drafted"] for r in sampled)
    held = sum(f.stat().st_size for f in other(kind).glob("*.safetensors"))  # float32, here float64
    assert runs[0].memory["draft"] > 2 * held * 0.95


def test_a_draft_model_that_is_the_target_is_always_right(session, model_folder):
    """Gate G8, with KV and weights of its own: nothing that is fed is out of step, at any temperature."""
    plain, _ = ran(session)
    use = f"draft_model:model={model_folder('llama')},k=3"
    for sampling in ({}, SAMPLING):
        ids, runs = ran(session, use, **sampling)
        assert ids == plain or sampling
        assert all(r.acceptance["accepted"] == r.acceptance["drafted"] > 0 for r in runs)


@pytest.fixture
def drafting(lab, monkeypatch):
    """An engine of a random model for which another random model drafts, both with tiny's tokenizer."""
    module = "workbench.speculative.second_model"
    second = lab.make_engine("paged", family="qwen3").executor.decoder
    monkeypatch.setattr(f"{module}.load_tokenizer", lambda model: load_tokenizer("tiny"))
    monkeypatch.setattr(f"{module}.opened", lambda model, target, pack: second)
    return lab.make_engine("paged", "draft_model:model=tiny,k=3", page_size=4)


def test_several_sequences_share_it_and_leave_nothing_behind(lab, drafting):
    """Ragged lengths and preemption: the engine's promises hold, and its KV is given back."""
    prompts = lab.prompts_of(4, seed=5, low=4, high=40)
    plain = lab.run_engine(lab.make_engine("paged", page_size=4), prompts, max_tokens=12, ignore_eos=True)
    engine = drafting
    lab.preempt_at(engine, {3, 6, 7}.__contains__)
    found = lab.run_engine(engine, prompts, max_tokens=12, ignore_eos=True)
    assert [found.ids(f"r{i}") for i in range(4)] == [plain.ids(f"r{i}") for i in range(4)]
    drafter = engine.drafting.drafter
    assert isinstance(drafter, SecondModel) and engine.forced
    weights = drafter._kv.decoder
    assert drafter.nbytes() == weights.weights.nbytes() + weights.table_nbytes
    assert not drafter._contexts


@pytest.mark.parametrize("kind", ["bytes", "sentences"])
def test_shared_tokens_are_those_that_stand_for_the_same_bytes(kind):
    target = load_tokenizer("tiny")
    second = wrapped(backend(kind))
    words = Vocabularies.of(target, second)
    assert words.relation == "overlapping"
    assert 30 < len(words.shared) == len(words.places.unique()) < second.vocab_size
    pairs = list(zip(words.shared.tolist(), words.places.tolist(), strict=True))
    special = target.encode("<|im_end|>")[0]
    for mine, theirs in pairs:
        if mine != special:
            lead = target.encode("a", add_special=False) if kind == "bytes" else []
            before = second.encode("a", add_special=False) if kind == "bytes" else []
            assert target.decode([*lead, mine]) == second.decode([*before, theirs])
    assert (special, second.encode("<|im_end|>")[0]) in pairs
    ids = target.encode(TEXT, add_special=False)
    assert second.decode(words.translated(ids)) == TEXT
    assert words.translated(words.shared[:5].tolist()) == words.places[:5].tolist()


def wrapped(own: Backend) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=own))


def test_vocabularies_that_are_the_same_or_have_nothing_in_common():
    target = load_tokenizer("tiny")
    assert Vocabularies.of(target, target).relation == "same"
    nothing = Vocabularies.of(target, wrapped(backend("words")))
    assert nothing.relation == "disjoint" and not len(nothing.shared)
    assert (True, b"<|im_end|>") in spellings(target) and (False, b"<|im_end|>") not in spellings(target)


def test_rows_that_stand_for_no_text_are_the_same_rows_of_a_model_with_the_same_tokens():
    """Embeddings are often padded, and at high temperatures such a row is drafted."""
    padded = wrapped(backend("bytes"))
    known = padded.vocab_size
    padded.vocab_size += 8
    words = Vocabularies.of(padded, padded)
    assert words.relation == "same"
    assert words.translated([known + 3, 5, known]) == [known + 3, 5, known]


def test_text_is_told_in_the_targets_tokens():
    target, second = load_tokenizer("tiny"), wrapped(backend("bytes"))
    words = Vocabularies.of(target, second)
    before, said = second.encode("def area("), second.encode("width, height)")
    assert words.retold(before, said) == target.encode("width, height)", add_special=False)
    assert words.retold(before, []) == []


def test_the_law_of_the_output_is_the_targets_though_drafts_are_of_shared_tokens_alone():
    """Closed form: p over 5 tokens, a draft model over 4 of which 3 are shared; R2 gives p exactly.

    A drafter that kept its chance of tokens that are not shared, without renormalising, would not.
    """
    gen = torch.Generator().manual_seed(3)
    target = (torch.randn(5, 5, generator=gen, dtype=torch.float64) * 1.5).softmax(-1)
    logits = torch.randn(5, 4, generator=gen, dtype=torch.float64) * 1.5
    shared, places = torch.tensor([0, 2, 4]), torch.tensor([3, 0, 1])
    q = torch.zeros(5, 5, dtype=torch.float64)
    q[:, shared] = logits[:, places].softmax(-1)
    want = exact_law.future(target, 0, 3)
    law = exact_law.output_law(rules.rejection, target, exact_law.sampled_chains(q, 2), 3)
    assert exact_law.distance(law, want) < 1e-12
    whole = torch.zeros(5, 5, dtype=torch.float64)
    whole[:, shared] = logits.softmax(-1)[:, places]
    drafts = [
        (chance, DraftTree.chain(tree.tokens, "toy", whole[[0, *tree.tokens[:-1]]]))
        for chance, tree in exact_law.sampled_chains(q, 2)
    ]
    assert exact_law.distance(exact_law.output_law(rules.rejection, target, drafts, 3), want) > 1e-2


@pytest.mark.parametrize(
    "options, says",
    [
        ("model=no-such-model", "no model 'no-such-model'"),
        ("model=tiny,layers=1", "layers = 1 has no effect: it is for layers of the model itself"),
        ("model=tiny,source=trained", "source = 'trained' has no effect"),
        ("model=tiny,vocab=64", "vocab = 64 has no effect: it is for layers of the model itself"),
        ("across=text", "across = 'text' has no effect: it is for a second model"),
        ("source=cut,vocab=64", "vocab = 64 has no effect: layers that are cut out"),
        ("layers=1,bits=8", "bits = 8 has no effect: layers that are cut out"),
    ],
)
def test_what_cannot_be_is_a_conflict(options, says, lab):
    with pytest.raises(PlanError, match=says):
        lab.make_engine("paged", f"draft_model:{options}")


def test_a_draft_model_without_a_shared_token_is_refused_with_the_way_out(other, session, model_folder):
    drafter = SecondModel(
        type("Options", (), {"model": str(other("words")), "across": "shared", "k": 2, "bits": 16}),
        str(model_folder("llama")),
    )
    with pytest.raises(OptionError, match="shares no token") as refused:
        drafter.attach_target(None)
    assert "across to text" in refused.value.hint


def test_it_stops_where_its_own_context_ends(lab, drafting, monkeypatch):
    drafter = drafting.drafting.drafter
    limited = drafter._kv.decoder.config.with_max_position(24)
    monkeypatch.setattr(drafter._kv.decoder, "config", limited)
    prompt = lab.prompts_of(1, seed=1, low=12, high=13)
    ran = lab.run_engine(drafting, prompt, max_tokens=20, ignore_eos=True)
    counts = [len(step.drafts) for step in ran.steps]
    assert len(ran.ids()) == 20 and 1 in counts and counts[-1] == 0


def test_the_target_in_fewer_bits_drafts_for_itself():
    """A quantized self is nearly always right."""
    rate = {}
    with Session("tiny", dtype="float64", numerics="pinned") as session:
        plain = [session.generate(p, max_tokens=24) for p in PROMPTS]
        for bits in (16, 8, 4):
            session.apply(Recipe.of("paged", f"draft_model:model=tiny,bits={bits}")).result(timeout=60)
            runs = [session.generate(p, max_tokens=24) for p in PROMPTS]
            assert [r.token_ids for r in runs] == [r.token_ids for r in plain]
            drafted = sum(r.acceptance["drafted"] for r in runs)
            rate[bits] = sum(r.acceptance["accepted"] for r in runs) / drafted
    assert rate[16] == 1 >= rate[8] >= rate[4] > 0.3


def test_weights_of_a_second_model_count_as_they_are_held():
    held = []
    with Session("tiny", dtype="bfloat16") as session:
        for bits in (16, 8, 4):
            session.apply(Recipe.of("paged", f"draft_model:model=tiny,bits={bits}")).result(timeout=60)
            held.append(session.generate("Why?", max_tokens=4).memory["draft"])
    assert held[0] > held[1] > held[2]
