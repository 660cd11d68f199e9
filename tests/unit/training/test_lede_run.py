"""From a model to what LEDE knows of it: logged drafts are the engine's, choices hold on held-out text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import workbench.training.heads.target as targets
import workbench.training.lede.collect as collecting
import workbench.training.lede.run as recipe
from workbench.cli.main import main
from workbench.core import catalog
from workbench.core.plan import ModelFacts, plan
from workbench.engine.params import SamplingParams
from workbench.models.heads import find_head, read_head, write_head
from workbench.spec.errors import HeadMismatch, MissingHead, OptionError
from workbench.spec.events import DraftRecord
from workbench.spec.recipe import Recipe
from workbench.speculative.lede import Config, bind
from workbench.speculative.lede.learnt import find, read
from workbench.speculative.lede.q_learning import Learning, greedy
from workbench.speculative.lede.rounds import Costs, rate, static
from workbench.speculative.lede.state import Limits, Reading
from workbench.speculative.lede.walks import Chain, Place, walk
from workbench.training.heads.target import Target, open_target
from workbench.training.lede.collect import collect, costs_of, prompts_of
from workbench.training.lede.fit import Fitting, fit, rounds_of, split
from workbench.training.lede.run import SAMPLING, Settings, drafted, in_engine, limits_for, train_lede

SMALL = Settings(
    prompts=8,
    length=16,
    places=8,
    longest=2,
    fitting=Fitting(Learning(steps=40, batch=32, hidden=8), times=2),
)


@pytest.fixture(scope="module")
def target() -> Target:
    """The model that ships, where nothing depends on what runs beside it."""
    return open_target("tiny", dtype="float64", numerics="pinned")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache folder of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("WORKBENCH_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def made(target: Target, cache: Path):
    return train_lede("tiny", SMALL, target=target, out=cache / "copy")


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_every_chain_that_is_logged_is_the_one_that_exit_would_draft(target, kind):
    """At temperature 0 rounds of a fixed exit and length are the same in the engine and in a walk."""
    prompts = prompts_of(target, "", 2, 24, 0)
    limits = limits_for(5, 3)
    texts = collect(target, prompts, limits, 16, SAMPLING[kind])
    assert [len(t) for t in texts] == [16] * 2
    for text in texts:
        for place in text:
            assert set(place.chains) == {1, 2, 3, 4}
            assert all(len(c.readings) == 3 and 0 <= c.accepted <= 3 for c in place.chains.values())
    assert any(c.accepted for t in texts for p in t for c in p.chains.values())
    if kind == "sampled":  # another draw of the same law: no two runs need agree
        return
    for exit in limits.exits:
        alone = Limits(5, 3, (exit,))
        for prompt, text in zip(prompts, texts, strict=True):
            records = drafted(target, (f"layerskip:exit={exit},k=3",), [prompt], SAMPLING[kind], 24)
            rounds = walk(text, static(exit, 3), alone, Costs(5), 0.5)
            expected = [(r.drafted, r.accepted) for r in rounds[:-1]]
            assert [(len(r.tokens), len(r.accepted)) for r in records][: len(expected)] == expected


def test_the_text_is_what_it_is_without_a_probe(target):
    """Logging changes no token, and a prompt's text does not depend on the others."""
    prompts = prompts_of(target, "stdlib/", 2, 24, 0)
    limits = limits_for(5, 2)
    both = collect(target, prompts, limits, 6, SamplingParams())
    assert both == [collect(target, [p], limits, 6, SamplingParams())[0] for p in prompts]


def test_costs_are_weights_that_are_read(target):
    costs = costs_of(target.source.config, 1000)
    weights = {n: target.source.tensor(n).numel() for n in target.source.names()}
    layers = sum(n for name, n in weights.items() if ".layers." in name and "norm" not in name)
    head = weights["model.embed_tokens.weight"]
    assert costs.head == pytest.approx(head / (head + layers))
    assert costs.looked(5) - costs.choice == pytest.approx(1)
    assert costs.choice == pytest.approx(1000 / (head + layers))


@pytest.mark.parametrize(
    "layers, exits", [(2, (1,)), (6, (1, 2, 3, 4, 5)), (30, (4, 7, 11, 14, 18, 22, 25, 29))]
)
def test_deep_models_are_looked_at_in_eight_places(layers, exits):
    assert limits_for(layers, 4).exits == exits


def test_there_must_be_text(target):
    with pytest.raises(OptionError, match="Documents that begin with 'nothing' have 0 tokens"):
        prompts_of(target, "nothing", 3, 24, 0)


def test_windows_that_learn_choose_and_judge_share_no_token(target, monkeypatch):
    """Every token of the stream is another, and there is just enough of it; with one less it is refused."""
    said = target.tokenizer
    for count, seed in ((2, 0), (3, 1), (5, 2), (9, 3), (14, 4), (22, 5), (60, 6)):
        for spare in (0, -1):
            ids = list(range(3 * count * 7 + spare))
            monkeypatch.setattr(collecting, "_passages", lambda *_: ["all"])
            monkeypatch.setattr(type(said), "encode", lambda *_, ids=ids: ids)
            if spare:
                with pytest.raises(OptionError, match=f"{count} prompts of 7 that share none take"):
                    prompts_of(target, "", count, 7, seed)
                continue
            found = prompts_of(target, "", count, 7, seed)
            assert sum(map(len, split(found, Fitting()))) == count
            assert len({i for window in found for i in window}) == count * 7


def test_what_is_said_of_rounds_in_the_engine_is_after_truncation():
    """The last round accepted three drafts of which the budget took one: no token of its own followed."""
    whole = DraftRecord("a", (1, 2, 3), (-1, 0, 1), (0,), 2, "lede", "r1", (1.0, 0.0), exit=2)
    cut = DraftRecord("a", (1, 2, 3), (-1, 0, 1), (0, 1, 2), 1, "lede", "r1", (1.0, 1.0, 1.0), exit=4)
    found = in_engine([whole, cut], 1)
    assert (found["rounds"], found["tau"], found["rate"]) == (2, 1.5, round(2 / 6, 4))
    assert (found["mean_exit"], found["mean_drafts"], found["exits"]) == (3.0, 3.0, {"2": 1, "4": 1})
    assert in_engine([], 1)["tau"] is None


SURE, UNSURE = Reading(0.95, 0.05, 0.1), Reading(0.2, 0.8, 0.9)


def toy_texts(count: int, seed: int, length: int = 60) -> list[list[Place]]:
    """Runs that layer 2 knows and layer 1 does not, and stretches that nobody knows; readings tell."""
    toss, out = random.Random(seed), []
    for _ in range(count):
        text: list[Place] = []
        while len(text) < length:
            run = toss.choice((0, 0, 1, 6))
            for left in range(run, -1, -1):
                known = tuple(SURE if j < left else UNSURE for j in range(6))
                text.append(Place({1: Chain((UNSURE,) * 6, 0), 2: Chain(known, left), 3: Chain(known, left)}))
        out.append(text[:length])
    return out


COSTS = Costs(layers=8, head=0.02, choice=0.001)
FITTING = Fitting(Learning(steps=1200, batch=64), times=6)


def test_a_policy_that_reads_beats_every_fixed_choice_on_held_out_text():
    found = fit(toy_texts(24, 1), Limits(8, 6, (1, 2, 3)), COSTS, FITTING)
    assert found.way.learnt
    assert found.way.limits.exits[0] == 2  # the first layer says nothing, and is not asked
    assert found.facts["learnt"]["rate"] > 1.08 * found.facts["fixed"]["rate"] > 1.08
    fresh = toy_texts(24, 99)
    learnt = rate(rounds_of(fresh, greedy(found.way.values, found.way.limits), found.way.limits, COSTS))
    exit, drafts = found.way.fixed
    assert learnt > 1.08 * rate(rounds_of(fresh, static(exit, drafts), Limits(8, 6, (exit,)), COSTS))


def test_where_nothing_pays_nothing_is_drafted():
    hopeless = [[Place({e: Chain((UNSURE,) * 6, 0) for e in (1, 2, 3)})] * 40 for _ in range(12)]
    found = fit(hopeless, Limits(8, 6, (1, 2, 3)), COSTS, FITTING)
    assert found.way.fixed == (0, 0) and not found.way.learnt
    assert found.facts["used"] == {"rate": 1.0}


def test_prompts_are_split_whole():
    learning, choosing, judging = split(list(range(24)), FITTING)
    assert judging == [3, 7, 11, 15, 19, 23]
    assert sorted(learning + choosing + judging) == list(range(24))
    assert len(learning) == 12 and len(choosing) == 6


def test_a_file_says_what_was_learnt_and_for_which_weights(made, target, cache):
    assert made.path == cache / "copy" / "tiny" / "lede.safetensors"
    assert made.fingerprint == target.source.fingerprint
    facts = made.facts
    assert facts["target"] == "tiny" and facts["trained"]["places"] == 8 * 8
    assert json.loads(json.dumps(facts)) == facts
    for kind in ("greedy", "sampled"):
        assert {"learnt", "fixed", "used"} <= set(facts["held_out"][kind])
        assert len(facts["curve"][kind]) >= 10
        for policy in ("auto", "fixed", "learnt"):
            assert facts["engine"][f"{kind}, {policy}"]["prompts"] == 2
    learnt = find("tiny", target.source.fingerprint, 5)
    again = read(made, 5)
    for kind, way in learnt.ways.items():
        assert again.ways[kind].limits == way.limits and again.ways[kind].fixed == way.fixed
        vector = [0.5] * 8
        assert way.values(vector) == again.ways[kind].values(vector)
    assert learnt.nbytes() > 0


def test_the_engine_plays_what_was_judged_offline(made, target):
    """Round by round at temperature 0: exits, lengths and what is accepted."""
    way = find("tiny", "", 5).ways["greedy"]
    prompts = prompts_of(target, "", 2, 24, 5)
    texts = collect(target, prompts, limits_for(5, SMALL.longest), 12, SamplingParams())
    for prompt, text in zip(prompts, texts, strict=True):
        records = drafted(target, ("layerskip", "lede:policy=learnt"), [prompt], SamplingParams(), 30)
        start = way.guard.learnt[0]
        rounds = walk(
            text, greedy(way.values, way.limits), way.limits, costs_of(target.source.config, 0), start
        )
        expected = [(r.exit, r.drafted, r.accepted) for r in rounds[:-1] if r.exit]
        assert [(r.exit, len(r.tokens), len(r.accepted)) for r in records][: len(expected)] == expected


def test_a_model_that_nothing_was_learnt_for_says_how_to_learn_it(made, target):
    context = type("Context", (), {"model": "no-such", "fingerprint": "", "config": target.source.config})
    with pytest.raises(MissingHead, match="workbench train lede --target no-such"):
        bind(Config(), context)
    with pytest.raises(HeadMismatch, match="other weights"):
        find("tiny", "0" * 64, 5)


@pytest.mark.parametrize("broken", ["no ways", "a shape", "a bias", "an exit", "a guard", "too few layers"])
def test_spd_10_a_file_that_does_not_fit_is_refused(made, cache, broken):
    facts, tensors, layers = json.loads(json.dumps(dict(made.facts))), made.tensors(), 5
    if broken == "no ways":
        del facts["ways"]["sampled"]
    elif broken == "a shape":
        tensors["greedy.weight0"] = torch.zeros(8, 3)
    elif broken == "a bias":
        tensors["sampled.bias0"] = torch.zeros(3)
    elif broken == "an exit":
        facts["ways"]["greedy"]["exits"] = [5]
    elif broken == "a guard":
        facts["ways"]["greedy"]["guard"] = {"learnt": ["x", 1], "fixed": [1, 1]}
    else:
        layers = 2
    path = cache / "heads" / "broken" / "lede.safetensors"
    write_head(path, "lede", made.fingerprint, facts, tensors)
    with pytest.raises(HeadMismatch, match="Learn them again"):
        read(read_head(path), layers)


def test_planning_says_that_nothing_was_learnt(made, target):
    config = target.source.config
    (conflict,) = plan(Recipe.of("paged", "layerskip", "lede"), ModelFacts("elsewhere", config))
    assert (conflict.first, conflict.second, conflict.resource) == ("lede", "model", "head")
    assert "workbench train lede --target elsewhere" in conflict.remedy
    assert not isinstance(plan(Recipe.of("paged", "layerskip", "lede"), ModelFacts("tiny", config)), list)
    (conflict, *_) = plan(Recipe.of("paged", "ngram", "lede"), ModelFacts("tiny", config))
    assert "Switch on LayerSkip" in conflict.remedy
    assert find_head("tiny", "lede", "").kind == "lede" and catalog.get("lede").spec.seam == "control"


def test_the_command_passes_its_options_on_and_shows_both_choices(made, monkeypatch, capsys):
    asked = {}

    def learn(model, settings, **rest):
        asked.update(rest, model=model, settings=settings)
        return made

    monkeypatch.setattr(recipe, "train_lede", learn)
    monkeypatch.setattr(targets, "open_target", lambda model, **rest: (model, rest["dtype"]))
    line = ["train", "lede", "--target", "tiny", "--documents", "stdlib/", "--seed", "3", "--foreground"]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert shown.count("greedy") == shown.count("sampled") == 3 and str(made.path) in shown.replace("\n", "")
    assert asked["settings"] == Settings(documents="stdlib/", seed=3) and asked["target"] == (
        "tiny",
        "bfloat16",
    )
    assert main([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["held_out"] == made.facts["held_out"] and told["fingerprint"] == made.fingerprint
