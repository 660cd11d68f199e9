"""Bad input through a session: a typed error for that request, at once, and no harm to others."""

from __future__ import annotations

import threading

import pytest
import torch

from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import (
    CapacityError,
    EmptyPrompt,
    MaskError,
    ModelNotFound,
    OptionError,
    PlanError,
    PromptTooLong,
    RecipeError,
    RequestError,
    SamplingError,
    TokenizerError,
    UnknownTechnique,
    UnknownToken,
)
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

WAIT = 60.0


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ("", {}, EmptyPrompt),
        ([], {}, EmptyPrompt),
        (None, {}, RequestError),
        (5, {}, RequestError),
        (b"abc", {}, RequestError),
        ([1.5, 2], {}, RequestError),
        ([True, 2], {}, RequestError),
        (["Hello", 3], {}, RequestError),
        ([None], {}, RequestError),
        ({"role": "user"}, {}, RequestError),
        ("half \ud800 a character", {}, RequestError),
        ([-1], {}, UnknownToken),
        ([10**9], {}, UnknownToken),
        ([{"role": "user"}], {}, TokenizerError),
        ([3] * 128, {}, PromptTooLong),
        ([3] * 500, {"max_tokens": 0}, PromptTooLong),
        ("half \udcff", {}, RequestError),
        ([{"role": "user", "content": "half \udcff"}], {}, RequestError),
        ("Hello", {"temperature": -1}, SamplingError),
        ("Hello", {"temperature": "hot"}, SamplingError),
        ("Hello", {"max_tokens": 2.5}, SamplingError),
        ("Hello", {"seed": "x"}, SamplingError),
        ("Hello", {"stop": [""]}, SamplingError),
        ("Hello", {"temprature": 1}, SamplingError),
        ("Hello", {"n": 9}, CapacityError),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_bad_requests_end_alone_with_a_typed_error(open_session, prompt, sampling, error, slow_down):
    session = open_session("paged")
    slow_down(session, 0.005)
    neighbour = session.submit("Hello", SamplingParams(max_tokens=12, ignore_eos=True))
    with pytest.raises(error) as err:
        session.generate(prompt, **sampling)
    assert isinstance(err.value, RequestError | TokenizerError)
    assert err.value.hint or error is RequestError
    assert len(neighbour.result(WAIT).token_ids) == 12
    assert session.generate("Hello", max_tokens=2).state == "done"


def test_a_token_the_model_lacks_is_named_beside_the_size_of_its_vocabulary(open_session):
    session = open_session("paged")
    size = session.facts.config.vocab_size
    with pytest.raises(UnknownToken, match=f"Token id {size} .* {size:,} tokens.*from 0 to {size - 1}"):
        session.generate([0, size], max_tokens=1)


def test_settings_and_masks_of_wrong_kinds_are_refused_at_once(open_session):
    session = open_session("paged", "prefix_cache")
    for kwargs in ({"params": "x"}, {"mask": object()}, {"salt": 3}, {"salt": "\udcff"}):
        with pytest.raises(RequestError):
            session.submit("Hello", **kwargs)
    run = session.generate("Hello " * 40, max_tokens=1)
    with pytest.raises(RequestError, match="salt"):
        session.save_cache("never.kv", run, salt=3)  # type: ignore[arg-type]
    with pytest.raises(RequestError):
        session.submit_all(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError):
        session.submit_all([], [])


def test_one_bad_prompt_of_a_batch_fails_alone(open_session):
    session = open_session("paged")
    run = session.generate(["Hello", "", "there"], max_tokens=2)
    assert [o["finish"] for o in run.outputs][1] == "error"
    assert run.outputs[1]["error"]["error"] == "EmptyPrompt"
    assert len(run.outputs[0]["token_ids"]) > 0
    assert run.outputs[0]["error"] is None


@pytest.mark.parametrize("how", ["nothing", "raises", "shape"])
def test_a_mask_that_dies_on_the_way_fails_its_request_alone(open_session, how, slow_down):
    session = open_session("paged")

    class Dies:
        key = "dies"

        def allowed(self, generated, path=()):
            if len(generated) < 3:
                return None
            if how == "raises":
                raise ZeroDivisionError("bug of a grammar")
            return torch.zeros(session.facts.config.vocab_size + (how == "shape"), dtype=torch.bool)

    slow_down(session, 0.005)
    neighbour = session.submit("Hello", SamplingParams(max_tokens=12, ignore_eos=True))
    job = session.submit("Hello", SamplingParams(max_tokens=9, ignore_eos=True), mask=Dies())
    with pytest.raises(MaskError):
        job.result(WAIT)
    assert job.state == "failed"
    assert len(job.value.token_ids) == 3  # what it had is kept
    assert job.value.error["error"] == "MaskError"
    assert len(neighbour.result(WAIT).token_ids) == 12


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"recipe": "paged"}, RecipeError),
        ({"recipe": Recipe.of("pagde")}, UnknownTechnique),
        ({"recipe": Recipe.of("prefix_cache")}, PlanError),
        ({"dtype": "float17"}, OptionError),
        ({"numerics": "x"}, OptionError),
        ({"device": "gpu"}, OptionError),
        ({"limits": "x"}, OptionError),
        ({"limits": EngineLimits(max_context=10**6)}, OptionError),
        ({"threads": 0}, OptionError),
        ({"threads": "many"}, OptionError),
        ({"threads": True}, OptionError),
        ({"threads": 100_000}, OptionError),
        ({"device": "meta"}, OptionError),
        ({"device": "cuda:999"}, OptionError),
        ({"limits": EngineLimits(kv_pool_tokens=10**23)}, OptionError),
    ],
    ids=str,
)
def test_sessions_that_cannot_be_opened(model_folder, kwargs, error):
    before = threading.active_count()
    with pytest.raises(error):
        Session(str(model_folder("llama")), **kwargs)
    assert threading.active_count() == before


def test_models_that_are_not_there(tmp_path):
    for model in ("no-such-model", str(tmp_path), None, 5):
        with pytest.raises(ModelNotFound):
            Session(model)


def test_a_pool_beyond_all_memory_names_its_size_and_the_way_out(model_folder):
    limits = EngineLimits(kv_pool_tokens=2**40 - 1)
    with pytest.raises(OptionError, match=r"kv_pool_tokens.*on cpu.*Lower kv_pool_tokens"):
        Session(str(model_folder("llama")), limits=limits)


def test_a_pool_smaller_than_one_reservation_says_what_was_reserved(model_folder):
    limits = EngineLimits(kv_pool_tokens=64)
    with (
        Session(str(model_folder("llama")), limits=limits) as session,
        pytest.raises(CapacityError, match=r"256 KV slots \(4 pages of 64\).*paged"),
    ):
        session.generate("a", max_tokens=1)
