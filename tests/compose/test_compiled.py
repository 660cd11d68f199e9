"""Compiled kernels with everything else: the same answers as the torch path, up to the order of sums.

Both run in the fast class with 16-bit weights. Noise is measured where both saw the same tokens; outputs may
part only where the reference's two best logits are closer than twice the noise (law 1), each at its own
margin. The distance to a float64 run may be at most twice the torch path's.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core import catalog
from workbench.core.plan import ModelFacts, plan
from workbench.core.plan_machine import machine_conflicts
from workbench.kernels.cpu import compiler
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
# Exact techniques are judged against the plain engine, lossy ones against the same recipe without compiled.
EXACT = (
    "",
    "chunked_prefill:budget=16",
    "prefix_cache",
    "radix_cache",
    "ngram chain",
    "ngram tree",
    "reference",
)
LOSSY = ("kv_int8", "kv_fp8", "kivi:residual=32,group=32", "rtn", "rtn:bits=8", "streaming_llm", "adacurdkv")

Rows = dict[tuple[int, int], torch.Tensor]


@pytest.fixture(autouse=True)
def _where() -> Any:
    if machine_conflicts(catalog.get("compiled").spec, "bfloat16", "fast"):
        pytest.skip("needs 64-bit Linux and a C++ compiler")
    with torch.inference_mode():
        yield


def run(
    lab: ModuleType,
    *uses: str,
    family: str,
    prompts: Any,
    drafter: Any = None,
    dtype: str = "bfloat16",
) -> tuple[list, Rows, Any]:
    """Output ids, every logits row by (sequence, position), and the steps, of a second, warm run."""
    page = 32 if any(u.startswith("kivi") for u in uses) else 16
    made = lab.make_engine(
        f"paged:page_size={page}", *uses, family=family, dtype=dtype, numerics="fast", pool=8192
    )
    if drafter is not None:
        drafter(made)
    for first in (True, False):
        sink: list = []
        if not first:
            lab.record_logits(made, sink)
        ran = lab.run_engine(made, prompts, max_tokens=20, ignore_eos=True)
    made.kv.check()
    base = min(seq for seq, _, _ in sink)
    rows = {(seq - base, position): row.float() for seq, position, row in sink}
    return [ran.ids(f"r{i}") for i in range(len(prompts))], rows, ran


@cache
def plainly(lab: ModuleType, family: str, dtype: str) -> tuple[list, list, Rows, Any]:
    """The prompts that exact techniques are judged on, and what an engine without any gives."""
    prompts = lab.prompts_of(9, seed=3, low=18, high=60)
    return prompts, *run(lab, family=family, prompts=prompts, dtype=dtype)


def parting(a: Any, b: Any) -> int:
    """How many tokens two outputs share."""
    return next((j for j, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def distance(prompts: Any, reference: tuple[list, Rows, Any], other: tuple[list, Rows, Any]) -> float:
    """The largest difference of logits where both saw the same tokens."""
    out = 0.0
    for i, (a, b) in enumerate(zip(reference[0], other[0], strict=True)):
        for j in range(parting(a, b)):
            at = (i, len(prompts[i]) - 1 + j)
            out = max(out, float((reference[1][at] - other[1][at]).abs().max()))
    return out


def judge(prompts: Any, reference: tuple[list, Rows, Any], other: tuple[list, Rows, Any]) -> float:
    """The noise of two runs; fails where they part at a margin beyond twice of it."""
    noise, margins = distance(prompts, reference, other), []
    for i, (a, b) in enumerate(zip(reference[0], other[0], strict=True)):
        if (n := parting(a, b)) < len(a):
            best = reference[1][i, len(prompts[i]) - 1 + n].topk(2).values
            margins.append(float(best[0] - best[1]))
    assert all(margin < 2 * noise for margin in margins), (margins, noise)
    return noise


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("feature", EXACT)
def test_exact_compositions_equal_the_plain_engine_up_to_noise(
    lab: ModuleType, scripted: ModuleType, family: str, feature: str
) -> None:
    prompts, *plain = plainly(lab, family, "bfloat16")
    name, _, kind = feature.partition(" ")

    def attach(engine: Any) -> None:
        known = [p + o for p, o in zip(prompts, plain[0], strict=True)]
        right = lambda seq, turn: (seq + turn) % 5  # noqa: E731
        scripted.attach(
            engine, scripted.Replay(known, 4, right=right, trees=kind == "tree", vocab=engine.vocab_size)
        )

    uses = ("compiled", name) if name else ("compiled",)
    other = run(lab, *uses, family=family, prompts=prompts, drafter=attach if kind else None)
    assert judge(prompts, plain, other) > 0
    _, *exact = plainly(lab, family, "float64")
    assert distance(prompts, exact, other) <= 2 * distance(prompts, exact, plain)
    if kind:
        drafts = [d for s in other[2].steps for d in s.drafts]
        assert any(len(d.accepted) >= 2 for d in drafts) and any(not d.accepted for d in drafts)
    if "cache" in name:
        assert sum(other[2].cached(f"r{i}") or 0 for i in range(9)) > 0
    path = other[2].steps[0].path
    assert "linear:compiled bf16" in path
    assert f"attention:{'reference' if name == 'reference' else 'compiled-pages'}" in path


@pytest.mark.parametrize("feature", LOSSY)
@pytest.mark.parametrize("family", ("llama", "gemma3"))
def test_lossy_compositions_lose_the_same(lab: ModuleType, family: str, feature: str) -> None:
    """A codec that moves a value by one step more is allowed that step; nothing else may differ."""
    prompts = lab.prompts_of(5, seed=4, low=30, high=70)
    alone = run(lab, feature, family=family, prompts=prompts)
    both = run(lab, "compiled", feature, family=family, prompts=prompts)
    assert judge(prompts, alone, both) > 0
    if feature != "adacurdkv":  # which keeps other tokens where two score alike
        exact = run(lab, feature, family=family, prompts=prompts, dtype="float64")
        assert distance(prompts, exact, both) <= 2 * distance(prompts, exact, alone) + 0.1
    path = both[2].steps[0].path
    assert "attention:compiled-pages" in path
    weights = {"rtn": "W4", "rtn:bits=8": "W8"}.get(feature, "bf16")
    assert f"linear:compiled {weights}" in path


def test_a_batch_of_any_size_equals_each_prompt_alone(lab: ModuleType) -> None:
    prompts = lab.prompts_of(33, seed=5, low=3, high=40)
    alone = [run(lab, "compiled", family="llama", prompts=[p]) for p in prompts]
    batched = run(lab, "compiled", family="llama", prompts=prompts)
    singles: Rows = {(i, at[1]): row for i, one in enumerate(alone) for at, row in one[1].items()}
    judge(prompts, ([one[0][0] for one in alone], singles, None), batched)


def fit(uses: tuple[str, ...], **where: Any) -> Any:
    """Plan of a recipe on a small model."""
    facts = ModelFacts("m", where.pop("config"), "")
    return plan(Recipe.of(*uses), facts, **where)


def test_pinned_numerics_and_other_dtypes_are_declared_conflicts(lab: ModuleType) -> None:
    config = lab.random_source("llama").config
    for where, resource in (
        ({"dtype": "bfloat16", "numerics": "pinned"}, "numerics"),
        ({"dtype": "float32", "numerics": "fast"}, "dtype"),
        ({"dtype": "bfloat16", "numerics": "fast", "device": "cuda"}, "cuda"),
    ):
        conflicts = fit(("compiled",), config=config, **where)
        assert [c.resource for c in conflicts] == [resource]
        assert conflicts[0].first == "compiled" and len(conflicts[0].remedy.split()) > 4
    assert isinstance(fit(("compiled",), config=config), Plan)


def test_without_a_compiler_the_plan_says_how_to_get_one(
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "find", lambda: None)
    conflicts = fit(("compiled",), config=lab.random_source("llama").config)
    assert [(c.second, c.resource) for c in conflicts] == [("install", "compiler")]
    assert "apt-get install g++" in conflicts[0].remedy
    assert isinstance(fit(("paged",), config=lab.random_source("llama").config), Plan)
