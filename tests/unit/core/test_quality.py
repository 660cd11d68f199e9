"""Quality: windows, scores against a forward of our own, and the whole task in a session."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core.quality import held_out_text, measure_quality, submit_quality
from workbench.core.quality_run import quality_steps
from workbench.core.quality_scores import WindowScores, kl_divergence, quality_metrics
from workbench.core.quality_windows import QualitySettings, Window, cut
from workbench.core.session import Session
from workbench.engine.score import score
from workbench.spec.errors import CapacityError, OptionError, PlanError, RequestError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

SMALL = QualitySettings(context=70, score=20, windows=2, greedy=6, chunk=7)


def finish(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_name(metrics: Any) -> dict[str, Any]:
    return {m.name: m for m in metrics}


# -- windows ------------------------------------------------------------------------------------------


def test_p1_windows_do_not_overlap_and_score_what_follows_the_context() -> None:
    settings = QualitySettings(context=10, score=5, windows=3)
    windows = cut(range(100), settings)
    assert [len(w.ids) for w in windows] == [15] * 3 and all(len(w.scored) == 5 for w in windows)
    assert windows[0].ids[0] == 0 and windows[-1].ids[-1] >= 98
    assert all(a.ids[-1] < b.ids[0] for a, b in pairwise(windows))
    assert len(cut(range(31), settings)) == 2  # as many as fit


def test_sliding_windows_score_every_token_once() -> None:
    windows = cut(range(50), QualitySettings(protocol="ppl", context=12, score=8, windows=99))
    assert [t for w in windows for t in w.scored] == list(range(1, 50))
    assert all(w.start <= 12 for w in windows)


@pytest.mark.parametrize("protocol", ["p1", "ppl"])
def test_a_text_that_is_too_short_is_refused(protocol: Any) -> None:
    with pytest.raises(RequestError, match="1 tokens"):
        cut([3], QualitySettings(protocol=protocol, context=4, score=2))


@pytest.mark.parametrize(
    "bad", [{"context": 0}, {"score": -1}, {"windows": True}, {"chunk": 1.5}, {"protocol": "x"}]
)
def test_settings_out_of_range_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        QualitySettings(**bad)


# -- scores -------------------------------------------------------------------------------------------


def test_kl_of_known_laws() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert kl_divergence(p.double(), q.double())[0] == pytest.approx(0.5 * math.log(2))
    assert kl_divergence(q.double(), p.double())[0] == math.inf
    assert kl_divergence(p.double(), p.double())[0] == 0


def test_metrics_of_known_scores() -> None:
    one, two = WindowScores(scored_bytes=4), WindowScores(scored_bytes=4)
    one.nll, one.plain_nll, one.kl, one.agree = [1.0, 1.0], [1.0, 1.0], [0.0, 0.2], [True, True]
    two.nll, two.plain_nll, two.kl, two.agree = [3.0, 3.0], [1.0, 1.0], [0.4, 0.6], [True, False]
    found = by_name(quality_metrics([one, two]))
    assert found["perplexity"].value == pytest.approx(math.exp(2))
    assert found["perplexity"].spread == pytest.approx((math.exp(1), math.exp(3)))
    assert found["perplexity_change"].value == pytest.approx(100 * (math.e - 1))
    assert found["kl"].value == pytest.approx(0.3) and found["kl"].spread == pytest.approx((0.1, 0.5))
    assert found["kl"].n == 2 and found["kl_max"].value == 0.6
    assert found["top1"].value == 75.0
    assert found["bits_per_byte"].value == pytest.approx(8 / math.log(2) / 8)


# -- teacher forcing through the engine -----------------------------------------------------------------


@pytest.mark.parametrize("uses", [(), ("paged", "prefix_cache"), ("paged", "chunked_prefill:budget=16")])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_scored_logits_are_those_of_one_whole_forward(
    lab: ModuleType, uses: tuple[str, ...], chunk: int
) -> None:
    text = ids(90)
    sink: list[tuple[int, int, torch.Tensor]] = []
    whole = lab.make_engine()
    lab.record_logits(whole, sink)
    lab.run_engine(whole, [text], max_tokens=0, prompt_logprobs=0)
    expected = {p: row for _, p, row in sink}
    engine = lab.make_engine(*uses)
    with torch.inference_mode():
        blocks = list(score(engine, text, 70, chunk))
    rows = {b.begin + i: b.logits[i] for b in blocks if b.logits is not None for i in range(b.n)}
    assert sorted(rows) == list(range(69, 89))
    assert all(torch.equal(rows[p], expected[p]) for p in rows)  # float64, pinned: bit for bit
    assert [t for b in blocks if b.logits is not None for t in b.targets] == text[70:]
    assert engine.kv.pools[0].used == 0
    engine.kv.check()


def test_closing_early_frees_the_pages(lab: ModuleType) -> None:
    engine = lab.make_engine("paged")
    with torch.inference_mode():
        steps = score(engine, ids(90), 70, 5)
        next(steps)
        assert engine.kv.pools[0].used > 0
        steps.close()
    assert engine.kv.pools[0].used == 0


def test_what_cannot_be_scored_is_refused(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", pool=64)
    for start, chunk in ((0, 8), (10, 8), (5, 0)):
        with pytest.raises(RequestError):
            next(score(engine, ids(10), start, chunk))
    with pytest.raises(CapacityError):
        next(score(engine, ids(200), 70))


def test_a_lossy_cache_shows_and_an_exact_recipe_does_not(lab: ModuleType) -> None:
    windows = [Window(tuple(ids(150, s)), 130) for s in range(2)]
    settings = QualitySettings(context=130, score=20, windows=2, greedy=8, chunk=7)

    def measure(*uses: str) -> dict[str, Any]:
        made = [lab.make_engine(*u) for u in (uses, ())]
        metrics, _, _ = finish(quality_steps(*made, windows, settings, lambda *_: None))
        return by_name(metrics)

    exact = measure("paged", "prefix_cache", "ngram")
    assert exact["kl"].value == 0 and exact["top1"].value == 100 and exact["greedy_same"].value == 100
    assert exact["perplexity"].value == exact["perplexity_plain"].value and exact["kv_ratio"].value == 1
    four, two = measure("paged", "kivi:bits=4"), measure("paged", "kivi:bits=2")
    assert 0 < four["kl"].value < two["kl"].value
    eight = measure("paged", "kv_int8")
    assert 0 < eight["kl"].value < two["kl"].value
    assert eight["kv_ratio"].value > 4  # from float64


# -- as a task of a session -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(model_folder: Callable[[str], Path]) -> Any:
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    with Session(str(model_folder("llama")), limits=limits) as made:
        yield made


TEXT = "Once upon a time there was a small engine that could be read. " * 40


def test_a_session_measures_another_recipe_and_keeps_its_own(session: Session) -> None:
    run = measure_quality(session, Recipe.of("paged", "kv_int8"), text=TEXT, settings=SMALL)
    found = by_name(run.metrics)
    assert run.kind == "measure" and run.state == "done" and session.recipe == Recipe()
    assert [u["id"] for u in run.recipe] == ["paged", "kv_int8"]
    assert found["kl"].n == 2 and found["kl"].value >= 0 and found["bits_per_byte"].value > 0
    assert found["kv_ratio"].value > 1.5 and found["kv_ratio"].of == "the plain cache"
    assert run.memory["kv_payload"] > 0 and any("kv_int8" in p for p in run.path)
    assert run.plan["quality"]["context"] == 70 and run.provenance is not None


def test_requests_are_served_between_its_steps_and_it_can_be_cancelled(session: Session) -> None:
    job = submit_quality(
        session, Recipe.of("paged"), text=TEXT, settings=QualitySettings(context=70, score=40, chunk=1)
    )
    run = session.generate("hello", max_tokens=3, ignore_eos=True)
    assert len(run.token_ids) == 3 and not job.ended
    job.cancel()
    assert job.wait(60) and job.state == "cancelled"
    assert len(session.generate("hello", max_tokens=2, ignore_eos=True).token_ids) == 2


def test_what_does_not_fit_is_refused_before_anything_runs(session: Session) -> None:
    with pytest.raises(PlanError):
        submit_quality(session, Recipe.of("prefix_cache"), text=TEXT, settings=SMALL)
    with pytest.raises(RequestError, match="positions"):
        submit_quality(session, text=TEXT * 100, settings=QualitySettings(context=4000, score=100))


def test_the_text_is_given_shipped_or_a_readable_file(tmp_path: Path) -> None:
    assert len(held_out_text()) > 100_000
    (tmp_path / "a.txt").write_text("été", encoding="utf-8")
    assert held_out_text(tmp_path / "a.txt") == "été" and held_out_text("as it is") == "as it is"
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("b.txt", "none.txt"):
        with pytest.raises(RequestError, match=name):
            held_out_text(tmp_path / name)
