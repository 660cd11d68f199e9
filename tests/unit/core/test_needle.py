"""Needles: where they lie, when a result says nothing, and that every kind of method is really asked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from workbench.core.needle import NeedleSettings, needles
from workbench.core.needle_run import NeedleResult, needle_run, submit_needle
from workbench.kv.cached import CachedRows, Reconstructed
from workbench.models.decoder import Decoder
from workbench.spec.errors import OptionError, PlanError, RecipeError, RequestError
from workbench.spec.recipe import Recipe

SETTINGS = NeedleSettings(context=90, depths=3, trials=1)
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
WAIT = 60


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_a_needle_lies_where_it_should_and_sentence_and_question_say_the_same() -> None:
    filler = list(range(1000, 3000))
    made = needles(encode, filler, NeedleSettings(context=200, depths=5, trials=2, seed=1))
    assert [n.depth for n in made] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1]
    for needle in made:
        assert len(needle.context) == 200
        words = bytes(i for i in needle.context if i < 1000).decode()
        answer = bytes(needle.answer).decode()
        asked = bytes(needle.question).decode()
        assert words == asked[1:] + answer + ".\n" and len(answer) == 6
        at = next(i for i, t in enumerate(needle.context) if t < 1000)
        assert at == round(needle.depth * (200 - len(words)))
        hay = [i for i in needle.context if i >= 1000]
        assert hay == list(range(hay[0], hay[0] + len(hay)))
        assert needle.ids == needle.context + needle.question + needle.answer
    assert made == needles(encode, filler, NeedleSettings(context=200, depths=5, trials=2, seed=1))
    assert made != needles(encode, filler, NeedleSettings(context=200, depths=5, trials=2, seed=2))


@pytest.mark.parametrize("name", ["context", "depths", "trials", "seed"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "3"])
def test_settings_out_of_range(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        NeedleSettings(**{name: value})  # type: ignore[arg-type]


def test_more_depths_than_tokens_are_refused() -> None:
    with pytest.raises(OptionError, match="depths = 100000 cannot be told apart"):
        NeedleSettings(context=128, depths=100_000)


@pytest.mark.parametrize(("depths", "trials"), [(5, 2001), (1, 10**12), (10_001, 1)])
def test_more_needles_than_can_be_asked_for_are_refused(depths: int, trials: int) -> None:
    with pytest.raises(OptionError, match="needles") as raised:
        NeedleSettings(context=20_000, depths=depths, trials=trials)
    assert "10,000" in raised.value.hint
    assert NeedleSettings(depths=5, trials=2000).count == 10_000


def test_a_plain_model_that_says_nothing_is_an_error(open_session: Any, monkeypatch: Any) -> None:
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda *args, **more: logits(*args, **more) * math.nan)
    job = submit_needle(open_session(), {"kv_fp8": Recipe.of("kv_fp8")}, text=TEXT, settings=SETTINGS)
    with pytest.raises(RequestError, match="plain model's logits are not finite"):
        job.result(WAIT)


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(RequestError, match="filler"):
        needles(encode, [1, 2, 3], NeedleSettings(context=200))


def found(plain: list[bool], mine: list[bool]) -> NeedleResult:
    n = len(plain)
    return NeedleResult([i / (n - 1) for i in range(n)], mine, [0.5] * n, plain, [1.0] * n)


def test_a_model_that_does_not_recall_makes_no_valid_result(open_session: Any) -> None:
    good, bad = found([True] * 9 + [False], [True] * 10), found([True] * 8 + [False] * 2, [True] * 10)
    assert good.valid and not good.verdict
    assert not bad.valid and "80%" in bad.verdict and "90%" in bad.verdict
    assert all("not valid here" in m.note for m in bad.metrics() if "recall" in m.name)
    assert [m.value for m in good.metrics() if m.name.startswith("needle_recall_plain")] == [90]
    run = needle_run(open_session().plan, Recipe.of("kv_fp8"), bad, SETTINGS, "interactive")
    assert run.plan["needle"]["valid"] is False and bad.verdict in run.notes


def test_every_kind_of_method_is_asked(open_session: Any, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    session = open_session()
    seen: list[int] = []

    def forgets(rows: CachedRows) -> Reconstructed:
        seen.append(rows.tokens)
        return Reconstructed(replace(rows, v=tuple(torch.zeros_like(v) for v in rows.v)), 1)

    methods = {
        "same": lambda rows: Reconstructed(rows, rows.nbytes_16bit()),
        "forgets": forgets,
        "plain": Recipe(),
        "kv_fp8": Recipe.of("kv_fp8"),
        "streaming_llm": Recipe.of("streaming_llm:keep=0.5"),
        "rtn": Recipe.of("rtn"),
        "cachegen": Recipe.of("cachegen"),
    }
    for aware in (False, True):
        result = submit_needle(session, methods, text=TEXT, settings=replace(SETTINGS, aware=aware)).result(
            WAIT
        )
        assert list(result) == list(methods) and not result["plain"].valid  # random weights recall nothing
        for name in ("same", "plain"):
            assert result[name].margin == pytest.approx(result[name].plain_margin, abs=1e-4)
        for name in ("forgets", "kv_fp8", "streaming_llm", "rtn", "cachegen"):
            assert result[name].margin != result[name].plain_margin
        assert result["same"].ratios == [1, 1, 1] and len(result["rtn"].margin) == 3
    assert seen[:3] == [90] * 3 and all(n > 90 for n in seen[3:])


def test_what_cannot_be_asked_is_refused_at_once(open_session: Any) -> None:
    session = open_session()
    with pytest.raises(PlanError):
        submit_needle(session, {"x": Recipe.of("kv_fp8", "kv_int8")}, text=TEXT, settings=SETTINGS)
    with pytest.raises(RecipeError):
        submit_needle(session, {"x": Recipe.of("kvtc", "kv_int8")}, text=TEXT, settings=SETTINGS)
    with pytest.raises(RequestError):
        submit_needle(session, {"x": Recipe()}, text="short", settings=SETTINGS)
    with pytest.raises(RequestError, match="positions"):
        submit_needle(session, {"x": Recipe()}, text=TEXT * 9, settings=NeedleSettings(context=4000))
