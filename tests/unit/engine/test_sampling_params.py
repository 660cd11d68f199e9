"""Sampling settings are refused by name, value and range."""

import dataclasses

import pytest

from workbench.engine.params import SamplingParams
from workbench.spec.errors import SamplingError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("temperature", "1"), ("temperature", True), ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.1),
        ("min_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("max_tokens", -1), ("n", 0),
        ("seed", -1), ("seed", 2**64), ("logprobs", -1), ("prompt_logprobs", 0.5), ("stop", ("",)),
        ("stop", (1,)), ("stop", 7), ("include_stop", 1), ("ignore_eos", None),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_range(field, value):
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**{field: value})
    assert f"{field} = {value!r}" in caught.value.message
    assert caught.value.hint.startswith("It takes ")


def test_limits_of_the_ranges_are_accepted():
    widest = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1, seed=2**64 - 1, logprobs=0)
    assert (widest.seed, widest.min_p, widest.logprobs) == (2**64 - 1, 1, 0)
    narrowest = SamplingParams(temperature=1e-300, top_p=1e-9, repetition_penalty=0.1, presence_penalty=-2)
    assert (narrowest.temperature, narrowest.top_p, narrowest.presence_penalty) == (1e-300, 1e-9, -2)


def test_one_bare_stop_string_is_one_stop():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_which_fast_path_applies():
    assert SamplingParams().plain_greedy
    penalised = SamplingParams(frequency_penalty=0.5)
    assert penalised.greedy and not penalised.plain_greedy
    assert not SamplingParams(temperature=1e-9).greedy


def test_settings_cannot_change_after_they_were_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0
