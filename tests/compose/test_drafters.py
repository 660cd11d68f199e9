"""Every exact rule × every drafter × every KV format: greedy output of the shipped model is that of no draft.

Pinned float64, with the heads that ship; identical means every token of every prompt. A lossy KV format is
compared with the same format without drafts. On each commit all pairs of two dimensions on 20 prompts;
nightly the whole product on 200, cell by cell: what passed with these very sources is not run again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import workbench
from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.models.datadir import data_dir
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("inference")

RULES = ("auto", "r2", "r3", "r4", "r5", "r6")
FORMATS = (
    "",
    "kv_fp8",
    "kv_int8",
    "kv_fp4",
    "kivi:residual=32,group=32",
    "xquant:residual=32,group=32,schedule=paper,km=1,vm=1",
)
"""Pages are of 32 tokens, so that formats that code whole pages code some in every prompt."""
DRAFTERS = (
    "ngram",
    "suffix",
    "suffix:tree=true",
    "draft_model:k=3",
    "layerskip",
    "medusa",
    "eagle:tree=chain",
    "eagle:tree=static",
    "eagle:depth=3",
    "eagle3:depth=3",
    "eagle3:depth=3,width=4",
    "fasteagle",
    "hybrid",
    "mtp:k=3",
)
FUSED = ("eagle3:depth=3", "draft_model:k=3", "mtp:k=3")
"""Drafters whose rounds may be one program, which judges by itself, on KV as it is."""
FEW, MANY = 20, 200


class Cell(NamedTuple):
    """One combination; an empty rule: the round is one program."""

    drafter: str
    rule: str
    codec: str

    @property
    def model(self) -> str:
        """Multi-token prediction needs a model that has a module."""
        return "tiny-mtp" if self.drafter.startswith("mtp") else "tiny"

    @property
    def uses(self) -> list[str]:
        """Its recipe."""
        rule = f"verify:rule={self.rule}" if self.rule else "fused_round"
        return [self.drafter, rule, *([self.codec] if self.codec else [])]

    def __str__(self) -> str:
        codec = self.codec.partition(":")[0]
        return "-".join((self.drafter, self.rule or "fused", codec or "plain"))


PROGRAMS = [Cell(drafter, "", "") for drafter in FUSED]
PRODUCT = [Cell(*c) for c in itertools.product(DRAFTERS, RULES, FORMATS)] + PROGRAMS
# A latin square: each drafter meets every format once, with another rule each time.
PAIRS = [
    Cell(drafter, RULES[(i + j) % len(RULES)], codec)
    for i, drafter in enumerate(DRAFTERS)
    for j, codec in enumerate(FORMATS)
] + PROGRAMS


@pytest.fixture(scope="module", autouse=True)
def _shipped_heads_only(pytestconfig: pytest.Config):
    """A cache of their own, kept for its calibrations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(pytestconfig.cache.mkdir("drafters")))
        yield


@cache
def decoder(model: str) -> Decoder:
    source = open_source(model)
    facts = ModelFacts(model, source.config, source.fingerprint)
    made = require(plan(Recipe(), facts, dtype="float64", numerics="pinned"))
    return Decoder(source.config, build_weights(made, source))


@cache
def prompts(model: str) -> list[tuple[int, ...]]:
    """Ragged pieces of text, 200 of them, that reach over the end of a page."""
    text = (data_dir() / "text" / "eval.txt").read_text()[:200_000]
    ids = load_tokenizer(model).encode(text)
    rng = random.Random(7)
    starts = [rng.randrange(len(ids) - 64) for _ in range(MANY)]
    return [tuple(ids[at : at + rng.randrange(20, 44)]) for at in starts]


def generate(lab: ModuleType, model: str, uses: list[str], count: int, tokens: int) -> tuple[Any, list[Any]]:
    """Output ids of every prompt, and the drafts that were judged."""
    target = decoder(model)
    facts = ModelFacts(model, target.config, target.weights.fingerprint)
    made = require(
        plan(
            Recipe.of("paged:page_size=32", *uses),
            facts,
            dtype="float64",
            numerics="pinned",
            limits=EngineLimits(8192, 0, 20, 256),
        )
    )
    engine = build_engine(made, target, build_kv(made, target), None, ())
    ran = lab.run_engine(engine, prompts(model)[:count], max_tokens=tokens, ignore_eos=True, max_steps=20_000)
    engine.kv.check()
    return [ran.ids(f"r{i}") for i in range(count)], [d for s in ran.steps for d in s.drafts]


@cache
def plain(lab: ModuleType, model: str, codec: str, count: int, tokens: int) -> Any:
    """What the model says without drafts."""
    return generate(lab, model, [codec] if codec else [], count, tokens)[0]


def check(lab: ModuleType, cell: Cell, count: int, tokens: int) -> dict[str, int]:
    """Run a cell; what it did, for the record."""
    said, drafts = generate(lab, cell.model, cell.uses, count, tokens)
    wanted = plain(lab, cell.model, cell.codec, count, tokens)
    identical = sum(a == b for a, b in zip(said, wanted, strict=True))
    assert identical == count, f"{count - identical} of {count} prompts differ"
    assert {d.rule for d in drafts} == {"r1"}
    return {
        "prompts": count,
        "tokens": sum(map(len, said)),
        "drafts": len(drafts),
        "accepted": sum(len(d.accepted) for d in drafts),
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_pairs_on_twenty_prompts(lab, drafter):
    """Each drafter with every format and every rule; a draft is kept and another is not."""
    done = [check(lab, cell, FEW, 6) for cell in PAIRS if cell.drafter == drafter]
    assert sum(d["drafts"] for d in done) > 0
    assert sum(d["accepted"] for d in done) > 0


@pytest.fixture(scope="session")
def finished(pytestconfig: pytest.Config) -> Path:
    """A folder for what passed, named by the sources: others begin anew."""
    digest = hashlib.sha256()
    roots = [Path(workbench.__file__).parent, data_dir() / "models", data_dir() / "heads", Path(__file__)]
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.suffix in (".py", ".cpp", ".h", ".json", ".safetensors"):
                digest.update(path.read_bytes())
    return Path(pytestconfig.cache.mkdir("nightly")) / digest.hexdigest()[:16]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cell", PRODUCT, ids=str)
def test_the_whole_product_on_two_hundred_prompts(lab, cell, finished):
    path = finished / f"{cell}.json".replace(":", "_").replace(",", "_").replace("=", "_")
    if path.is_file():
        assert json.loads(path.read_text())["prompts"] == MANY
        return
    done = check(lab, cell, MANY, 32)
    finished.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(done))
