"""Turns: only steps of a full batch count, and they count everything."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from workbench.core.drafters.turns import Turn, same_outputs, take_turn
from workbench.engine.params import SamplingParams
from workbench.spec.errors import RequestError

PROMPTS = [[3 + i, 5, 9, 5, 9, 5 + i] * (2 + i) for i in range(5)]


@pytest.fixture
def made(lab: ModuleType) -> Any:
    def engine(*uses: str, batch: int) -> Any:
        return lab.make_engine("paged", *uses, dtype="float32", sequences=batch)

    return engine


def turn(engine: Any, batch: int, tokens: int = 12, **more: Any) -> Turn:
    return take_turn(engine, PROMPTS, batch, SamplingParams(max_tokens=tokens, ignore_eos=True, **more))


@pytest.mark.parametrize("uses", [(), ("ngram:k=4",)])
@pytest.mark.parametrize("batch", [1, 2])
def test_only_steps_of_a_full_batch_are_timed(made: Any, uses: tuple[str, ...], batch: int) -> None:
    engine = made(*uses, batch=batch)
    found = turn(engine, batch)
    assert found.batch == batch and found.ms > 0 and not engine.has_work
    drafted = sum(n for n, _, _ in found.drafts)
    assert sum(s.rows for s in found.steps) == batch * len(found.steps) + drafted
    assert sum(s.drafted for s in found.steps) == len(found.drafts)
    emitted = sum(e for _, _, e in found.drafts)
    assert found.tokens == emitted + batch * len(found.steps) - len(found.drafts)
    assert all(0 <= kept <= nodes and kept <= emitted for nodes, kept, emitted in found.drafts)
    assert bool(found.drafts) == bool(uses)


def test_alone_every_token_but_the_prompts_own_is_timed(made: Any) -> None:
    found = turn(made(batch=1), 1)
    assert [len(ids) for ids in found.outputs] == [12] * 5
    assert (found.tokens, len(found.steps)) == (5 * 11, 5 * 11)


def test_a_batch_is_kept_full_and_left_when_it_no_longer_is(made: Any) -> None:
    found = turn(made(batch=2), 2)
    assert {s.rows for s in found.steps} == {2}
    assert sum(len(ids) for ids in found.outputs) < 5 * 12  # the last prompt alone is not run to its end


def test_drafts_change_no_text_and_a_turn_goes_to_disk_and_back(made: Any) -> None:
    plain, drafted = turn(made(batch=2), 2), turn(made("ngram:k=4", batch=2), 2)
    assert same_outputs(drafted, plain) == 5
    other = Turn(2, (), (), ((99,), *plain.outputs[1:]))
    assert same_outputs(other, plain) == 4
    assert Turn.from_dict(json.loads(json.dumps(drafted.to_dict()))) == drafted


def test_a_prompt_that_cannot_be_served_is_an_error(made: Any) -> None:
    engine = made(batch=1)
    with pytest.raises(RequestError):
        take_turn(engine, [[1] * 500], 1, SamplingParams(max_tokens=4))
