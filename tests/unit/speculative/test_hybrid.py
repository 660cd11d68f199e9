"""Suffix decoding before a head: exact output, the better of two drafts, both kept up to date."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.models.heads import write_head
from workbench.spec.errors import PlanError
from workbench.speculative.hybrid import Hybrid, _score

PAGE = 4


@pytest.fixture(scope="module", autouse=True)
def cache(lab: ModuleType, random_heads: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """Random EAGLE-3 and EAGLE heads where they are looked for."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        folder: Path = tmp_path_factory.mktemp("cache")
        patch.setenv("WORKBENCH_CACHE", str(folder))
        for family in ("llama", "gemma3"):
            source = lab.random_source(family)
            for kind, features in (("eagle3", [0, 1, 2]), ("eagle", [2])):
                tensors = getattr(random_heads, kind)(source.config)
                random_heads.put(
                    folder, f"random-{family}", kind, source.fingerprint, tensors, features=features, layers=1
                )
        yield folder


@pytest.fixture(scope="module")
def prompts(lab: ModuleType) -> list[list[int]]:
    return lab.prompts_of(4, seed=2, low=12, high=40)


def generate(lab: ModuleType, engine, prompts, **params):
    settings = {"max_tokens": 24, "ignore_eos": True, **params}
    ran = lab.run_engine(engine, prompts, **settings)
    engine.kv.check()
    return [ran.ids(f"r{i}") for i in range(len(prompts))], [d for s in ran.steps for d in s.drafts]


@pytest.mark.parametrize("head", ["eagle3", "eagle"])
@pytest.mark.parametrize(
    "uses", [(), ("chunked_prefill:budget=16",), ("prefix_cache",), ("kv_int8",), ("kv_fp4",)], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_output_is_the_targets_and_both_draft(lab, prompts, uses, head, family):
    plain = lab.make_engine("paged", *uses, page_size=PAGE, family=family)
    expected, _ = generate(lab, plain, prompts)
    engine = lab.make_engine("paged", f"hybrid:head={head}", *uses, page_size=PAGE, family=family)
    sources = set()
    for _ in range(2):  # the second time what was said before is copied
        found, drafts = generate(lab, engine, prompts)
        assert found == expected
        sources |= {d.source for d in drafts}
    assert head in sources and any(s.startswith("suffix") for s in sources)
    copied = [d for d in drafts if d.source.startswith("suffix")]
    assert any(len(d.accepted) > 2 for d in copied)


def test_a_seeded_run_says_what_the_plain_run_says(lab, prompts):
    params = {"temperature": 0.8, "seed": 4}
    expected, _ = generate(lab, lab.make_engine("paged", page_size=PAGE), prompts, **params)
    engine = lab.make_engine("paged", "hybrid", "verify:rule=r4", page_size=PAGE)
    assert generate(lab, engine, prompts, **params)[0] == expected
    _, drafts = generate(lab, lab.make_engine("paged", "hybrid", page_size=PAGE), prompts, **params)
    rules = {d.source.partition(":")[0]: d.rule for d in drafts}
    assert rules["eagle3"] == "r2" and rules.get("suffix", "r3") == "r3"


class Fixed:
    """A drafter that always says the same."""

    features, max_draft, kv_layers = (0,), 4, 0

    def __init__(self, tree: DraftTree | None) -> None:
        self.tree, self.seen = tree, []

    def begin(self, seq, tokens):
        self.seen.append(("begin", seq))

    def propose(self, contexts):
        return [self.tree for _ in contexts]

    def commit(self, seq, tokens):
        self.seen.append(("commit", seq, tuple(tokens)))

    def forget(self, seq):
        self.seen.append(("forget", seq))

    def nbytes(self):
        return 5


def test_what_is_expected_to_give_more_drafts():
    copied = DraftTree((1, 2, 3), (-1, 0, 1), "suffix", confidence=(0.5, 1.0, 1.0))
    own = DraftTree((7,), (-1,), "head")
    assert _score(copied) == pytest.approx(1.5) and _score(None) == 0
    both = Hybrid(Fixed(copied), Fixed(own), lead=1.0)
    ask = [DraftContext(3, [1, 2], 8, True)]
    assert both.propose(ask) == [copied]
    both.expected = 1.6
    assert both.propose(ask) == [own]
    for _ in range(400):  # what the head really gets moves the choice
        both.propose(ask)
        both.commit(3, [9])
    assert both.expected < 1.5 and both.propose(ask) == [copied]
    expected = both.expected
    both.commit(3, [9, 9, 9])  # what was copied says nothing of the head
    assert both.expected == expected
    both.begin(4, [1])
    both.forget(4)
    assert both.head.seen[-2:] == both.copying.seen[-2:] == [("begin", 4), ("forget", 4)]
    assert both.nbytes() == 10
    quiet = Hybrid(Fixed(copied), Fixed(None), lead=9.0)
    assert quiet.propose(ask) == [copied]  # a head that has nothing to say does not stop a copy


def test_copies_are_held_against_what_came_of_them():
    copied = DraftTree((1, 2, 3), (-1, 0, 1), "suffix", confidence=(0.5, 1.0, 1.0))
    own = DraftTree((7,), (-1,), "head")
    ask = [DraftContext(3, [1, 2], 8, True)]
    both = Hybrid(Fixed(copied), Fixed(own), lead=1.0)
    both.expected = 0.6
    for _ in range(400):
        if both.propose(ask) == [own]:
            break
        both.commit(3, [9])  # counts promise 1.5 tokens, none comes
    assert both.propose(ask) == [own] and both.came / both.scored < 0.4
    assert both.expected == 0.6


def test_what_nobody_drafted_says_nothing_of_the_head():
    both = Hybrid(Fixed(None), Fixed(None), 1.0)
    context = DraftContext(1, [5, 6], 4, True)
    assert both.propose([context]) == [None]
    both.commit(1, [7])
    assert both.expected == 1.0 and both.came == both.scored == 1.0


def test_a_copy_costs_no_pass_of_the_head():
    copied = DraftTree((1, 2), (-1, 0), "suffix", confidence=(0.25, 1.0))
    own = DraftTree((7,), (-1,), "head")
    ask = [DraftContext(3, [1, 2], 8, True)]
    for cost, best in ((0.0, own), (0.1, own), (0.2, copied)):
        both = Hybrid(Fixed(copied), Fixed(own), lead=1.0, cost=cost)
        both.expected = 0.7  # (1 + 0.5) (1 + cost) against 1.7
        assert both.propose(ask) == [best]


def test_options_reach_the_head(lab):
    engine = lab.make_engine("paged", "hybrid:depth=2,confidence=0.2", page_size=PAGE)
    drafts = engine.drafting.drafter.head.drafts
    assert (drafts.depth, drafts.confidence) == (2, 0.2)


def test_without_its_head_it_cannot_be_switched_on(lab):
    with pytest.raises(PlanError, match="no eagle3 head"):
        lab.make_engine("paged", "hybrid", family="qwen2")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("head=medusa,depth=2", "depth"),
        ("head=medusa,confidence=0.2", "confidence"),
        ("head=eagle,confidence=0.2", "confidence"),
    ],
)
def test_what_the_chosen_head_lacks_is_refused(options, name, lab):
    with pytest.raises(PlanError, match=rf"hybrid\.{name} = .* has no effect") as caught:
        lab.make_engine("paged", f"hybrid:{options}", page_size=PAGE)
    assert f"Leave {name} at" in str(caught.value)


def test_bits_of_tied_heads_are_refused_by_them(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    path = tmp_path / "heads" / "random-llama" / "medusa.safetensors"
    ids = {"ids": torch.arange(1, dtype=torch.int32)}
    write_head(path, "medusa", lab.random_source("llama").fingerprint, {"heads": 1, "paths": [[0]]}, ids)
    with pytest.raises(PlanError, match=r"medusa\.bits = 8 has no effect"):
        lab.make_engine("paged", "hybrid:head=medusa,bits=8", page_size=PAGE)
