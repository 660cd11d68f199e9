"""What every technique owes whoever switches it on, run on random tiny models of three families.

Pinned float64, where Law 1 allows no excuse (unless a technique works elsewhere only): off → on → off is the
same bits, an exact technique gives the plain tokens, bytes are those of storages held, an abort ends within
the step, seeds reproduce. "Off" is the same recipe without the technique but with what it needs, so that the
difference is its own.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core import catalog
from workbench.core.plan import ModelFacts, pair_recipe, plan
from workbench.core.plan_machine import machine_conflicts
from workbench.core.session import Session
from workbench.core.shipped import fitting_model
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

IDS = list(catalog.MODULES)
builtin_id = id  # tests call a technique's id by its name
FAMILIES = ("llama", "qwen3", "gemma3")
# One page of every format closes within the longest prompt.
LENGTHS = (150, 40, 5)

each = pytest.mark.parametrize("id", IDS)
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def prompts(vocab: int) -> tuple[tuple[int, ...], ...]:
    """Ragged prompts that repeat themselves, so that drafts by look-up happen."""
    gen = torch.Generator().manual_seed(11)
    piece = torch.randint(0, vocab, (25,), generator=gen).tolist()
    return tuple(tuple((piece * 8)[:n]) for n in LENGTHS)


def on_off(id: str) -> tuple[Recipe, Recipe]:
    """The technique with what it needs, and the same without it."""
    on = pair_recipe(id)
    return on, on.without(id)


def require_family(lab: ModuleType, id: str, family: str) -> None:
    """Skip what a technique says of itself that it cannot do for a family of models."""
    facts = ModelFacts(family, lab.random_source(family).config)
    made = plan(pair_recipe(id), facts)
    for conflict in made if isinstance(made, list) else ():
        if conflict.second == "model":
            pytest.skip(conflict.remedy)


def setting(id: str) -> dict[str, str]:
    """Where a technique is judged; one that needs what this machine lacks is skipped."""
    spec = catalog.get(id).spec
    if machine_conflicts(spec, *(spec.dtypes or ("float64",))[:1], *(spec.numerics or ("pinned",))[:1]):
        pytest.skip(f"{spec.title} cannot run on this machine")
    return {
        "dtype": "float64" if not spec.dtypes else spec.dtypes[0],
        "numerics": "pinned" if not spec.numerics else spec.numerics[0],
    }


def engine(lab: ModuleType, recipe: Recipe, family: str, id: str) -> Engine:
    require_family(lab, id, family)
    return lab.make_engine(*lab.acting(recipe), family=family, pool=1024, **setting(id))


def outcome(lab: ModuleType, made: Engine, **sampling: Any) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of each prompt's output."""
    sampling = {"max_tokens": 10, "logprobs": 0, **sampling}
    asked = prompts(lab.VOCAB)
    ran = lab.run_engine(made, asked, **sampling)
    return [(ran.ids(f"r{i}"), ran.logprobs(f"r{i}")) for i in range(len(asked))]


def under_pressure(lab: ModuleType, recipe: Recipe, family: str, id: str) -> list[Any]:
    """The longest prompt before and after another one has filled the pool, on pages of 16."""
    made = lab.make_engine(
        *(u.to_text() for u in recipe), family=family, pool=192, page_size=16, **setting(id)
    )
    first, other = prompts(lab.VOCAB)[0], tuple(reversed(prompts(lab.VOCAB)[0]))
    seen = []
    for prompt in (first, other, first):
        ran = lab.run_engine(made, [prompt], max_tokens=10, logprobs=0)
        seen.append((ran.ids(), ran.logprobs()))
    made.kv.check()
    made.kv.close()
    return [seen[0], seen[2]]


@cache
def _first(lab: ModuleType, recipe: Recipe, family: str, **where: str) -> list[tuple[list[int], list[float]]]:
    return outcome(lab, lab.make_engine(*lab.acting(recipe), family=family, pool=1024, **where))


def of_a_new_engine(
    lab: ModuleType, recipe: Recipe, family: str, id: str
) -> list[tuple[list[int], list[float]]]:
    """What a new engine gave for a recipe, made once for all techniques that are judged in one place."""
    require_family(lab, id, family)
    return _first(lab, recipe, family, **setting(id))


@each
@families
def test_off_on_off_is_bitwise_and_exact_means_the_plain_tokens(
    lab: ModuleType, id: str, family: str
) -> None:
    on, off = on_off(id)
    before = of_a_new_engine(lab, off, family, id)
    made = engine(lab, on, family, id)
    during = outcome(lab, made)
    again = outcome(lab, made)  # on a warm engine: cached pages, drafters and scratch that were used before
    after = outcome(lab, engine(lab, off, family, id))
    assert before == after
    assert during == again
    spec = catalog.get(id).spec
    if spec.seam == "verify":  # a lossy rule changes the law that is sampled; at temperature 0 there is none
        assert during == before
        drawn = [outcome(lab, made, temperature=6.0, seed=3, max_tokens=30) for made in (made, made)]
        plain = outcome(lab, engine(lab, off, family, id), temperature=6.0, seed=3, max_tokens=30)
        assert drawn[0] == drawn[1]
        assert (drawn[0] == plain) == (spec.kind == "exact"), (
            "a lossy rule that changes nothing was not asked"
        )
    elif spec.seam == "kv_storage":  # it works on what a full pool gives up: with room it changes nothing
        assert during == before
        cramped, plain = (under_pressure(lab, recipe, family, id) for recipe in (on, off))
        assert cramped == under_pressure(lab, on, family, id)
        assert cramped[0] == plain[0] and cramped[1] != plain[1]
    elif spec.kind != "exact":
        assert during != before, "a lossy technique that changes nothing was not in the path"
    elif spec.seam in ("attention", "kernels"):  # another order of summing the same sums
        noise = 1e-9 if setting(id)["dtype"] == "float64" else 0.1
        for (ids, a), (plain, b) in zip(during, before, strict=True):
            same = next((i for i, x in enumerate(ids) if x != plain[i]), len(ids))
            assert same == len(ids) or noise > 1e-9  # in 16 bits two tokens may be as likely as each other
            assert a[:same] == pytest.approx(b[:same], abs=noise)
    else:
        assert during == before


@each
def test_an_engine_that_is_dropped_leaves_no_tensor(lab: ModuleType, id: str) -> None:
    """Nothing global, no cycle that a collector cannot see: only the shared decoder stays."""
    on, _ = on_off(id)
    made = engine(lab, on, "llama", id)
    outcome(lab, made)
    shared = {builtin_id(t) for t in tensors([made.executor.decoder])}
    alive = [weakref.ref(t) for t in tensors([made]) if builtin_id(t) not in shared]
    assert alive
    del made
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


@each
@families
def test_bytes_shown_are_bytes_of_storages(lab: ModuleType, id: str, family: str) -> None:
    """Every tensor that the KV stores and the decoder hold is counted once, whatever its category."""
    on, _ = on_off(id)
    made = engine(lab, on, family, id)
    outcome(lab, made)
    shown = made.memory()
    assert all(isinstance(v, int) and v >= 0 for v in shown.values())
    drafts = made.drafting.nbytes() + made.controlling.nbytes()
    assert shown["draft"] == drafts
    # A codec holds its calibration, and an index of the rows of the step that runs: an activation.
    codecs = ("codec", "_codecs", "_open_codec")
    calibration = made.kv.stores[0].codec.nbytes
    calibration += made.kv.cold.tier.codec.nbytes if made.kv.cold is not None else 0
    assert shown.get("calibration", 0) == calibration
    kv = storages([v for store in made.kv.stores for n, v in vars(store).items() if n not in codecs])
    weights = storages([made.executor.decoder])
    assert sum(shown.values()) - drafts - calibration == sum({**kv, **weights}.values())


def storages(roots: list[Any]) -> dict[int, int]:
    """Bytes by address of every storage behind the tensors that ``roots`` reach."""
    held = [t.untyped_storage() for t in tensors(roots)]
    return {s.data_ptr(): s.nbytes() for s in held if s.nbytes()}


def tensors(roots: list[Any]) -> list[torch.Tensor]:
    """Every tensor reachable through containers and through attributes of the workbench's own objects."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    todo = list(roots)
    while todo:
        item = todo.pop()
        if builtin_id(item) in seen:
            continue
        seen.add(builtin_id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            todo.extend(item)
        elif type(item).__module__.startswith("workbench"):
            todo.extend(vars(item).values() if hasattr(item, "__dict__") else ())
            slots = [s for c in type(item).__mro__ for s in getattr(c, "__slots__", ())]
            todo.extend(getattr(item, s) for s in slots if hasattr(item, s))
    return found


@each
def test_an_abort_ends_within_the_step_and_returns_every_page(lab: ModuleType, id: str) -> None:
    on, _ = on_off(id)
    for steps in (0, 1, 4):  # waiting, during prefill, while decoding
        made = engine(lab, on, "llama", id)
        with torch.inference_mode():
            for i, prompt in enumerate(prompts(lab.VOCAB)):
                made.add(Request(f"a{i}", prompt, SamplingParams(max_tokens=40)))
            for _ in range(steps):
                made.step()
            events = [e for name in made.alive() for e in made.abort(name)]
        assert [e.finish for e in events] == ["abort"] * len(LENGTHS)
        assert not made.has_work and not made.scheduler.running
        assert all(pool.used == 0 for pool in made.kv.pools)
        made.kv.check()
        assert outcome(lab, made) == of_a_new_engine(lab, on, "llama", id), "the engine is as new"


@each
def test_seeds_reproduce_and_differ(lab: ModuleType, id: str) -> None:
    on, _ = on_off(id)
    made = engine(lab, on, "llama", id)

    def draw(seed: int) -> list[list[int]]:
        return [ids for ids, _ in outcome(lab, made, temperature=1.0, seed=seed, max_tokens=20)]

    first = draw(7)
    assert draw(7) == first
    assert draw(8) != first


# -- sessions ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions() -> Any:
    """Sessions on shipped models by setting, toggled by every test of this part."""
    limits = EngineLimits(kv_pool_tokens=1024, max_context=256)
    with contextlib.ExitStack() as stack:

        @cache
        def session(model: str, **where: Any) -> Session:
            return stack.enter_context(Session(model, limits=limits, **where))

        yield session


@pytest.fixture
def tiny(sessions: Callable[..., Session], id: str) -> Session:
    """The session in which a technique is judged."""
    return sessions(fitting_model((id,)), **setting(id))


TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height,"


def said(session: Session, recipe: Recipe) -> Any:
    session.apply(recipe).result(timeout=120)
    run = session.generate(TEXT, max_tokens=8, logprobs=0)
    return run, [(t["id"], t["logprob"]) for t in run.outputs[0]["tokens"]]


@each
def test_toggling_a_live_session_restores_the_plain_bits(tiny: Session, id: str) -> None:
    on, off = on_off(id)
    _, before = said(tiny, off)
    run, during = said(tiny, on)
    memory = tiny.memory()
    _, after = said(tiny, off)
    assert before == after
    spec = catalog.get(id).spec
    if spec.kind == "exact":
        assert [t for t, _ in during] == [t for t, _ in before]
    assert id in [u["id"] for u in run.recipe]
    assert run.plan["kind"] == spec.kind
    assert run.state == "done" and all(m.tag == "measured" for m in run.metrics)
    assert memory["weights"] > 0


@each
@families
def test_sessions_run_it_on_a_folder_of_any_family(
    lab: ModuleType, model_folder: Callable[[str], Path], id: str, family: str
) -> None:
    require_family(lab, id, family)
    on, _ = on_off(id)
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    where = {"dtype": (catalog.get(id).spec.dtypes or ("float32",))[0], "numerics": "fast"}
    setting(id)
    with Session(str(model_folder(family)), on, limits=limits, **where) as session:
        run = session.generate("Hello there", max_tokens=4, ignore_eos=True)
    assert run.state == "done" and len(run.token_ids) == 4


@each
def test_cancelling_keeps_what_there_is_and_stops(tiny: Session, id: str) -> None:
    on, _ = on_off(id)
    tiny.apply(on).result(timeout=120)
    seen = []

    def cancel_at_first_token(event: Any) -> None:
        if getattr(event, "tokens", ()) and not seen:
            seen.append(len(event.tokens))
            tiny.cancel_all()

    stop = tiny.listen(cancel_at_first_token)  # first, so that no token is missed
    job = tiny.submit(TEXT, SamplingParams(max_tokens=180, ignore_eos=True))
    assert job.wait(60)
    stop()
    assert job.state == "cancelled"
    run = job.value
    assert run.state == "cancelled" and run.outputs[0]["finish"] == "abort"
    assert len(run.token_ids) == seen[0], "tokens came after the step in which it was cancelled"
