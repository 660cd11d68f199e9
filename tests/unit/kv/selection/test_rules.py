"""When selectors act and how much they leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workbench.engine.selection import KVSelector
from workbench.kv.selection.rules import Rules
from workbench.kv.selection.topk import protected, top_slots, top_slots_per_head

IDS = ("adacurdkv", "curdkv", "expected_attention", "h2o", "knorm", "snapkv", "streaming_llm", "random")


def rules(**given: object) -> Rules:
    return Rules(**{"keep": 0.5, "sinks": 4, "recent": 0, "protocol": "aware", **given})  # type: ignore[arg-type]


def test_the_protocol_says_where_the_first_selection_is() -> None:
    assert [rules().next(at, 30, 20) for at in (0, 19, 20, 29, 30, 99)] == [30, 30, 30, 30, None, None]
    agnostic = rules(protocol="agnostic")
    assert [agnostic.next(at, 30, 20) for at in (0, 19, 20, 30)] == [20, 20, None, None]


def test_an_interval_repeats_at_positions_that_do_not_depend_on_where_one_asks() -> None:
    every = rules(interval=7, protocol="agnostic")
    assert [every.next(at, 30, 20) for at in (0, 20, 26, 27, 33, 34)] == [20, 27, 27, 34, 34, 41]
    assert rules(interval=1).next(30, 30, 30) == 31


@pytest.mark.parametrize(
    ("keep", "n", "kept"), [(0.5, 65, 32), (0.7, 10, 7), (0.05, 3, 1), (1.0, 9, 9), (0.3, 10, 3)]
)
def test_the_budget_is_the_share_rounded_down_and_never_nothing(keep: float, n: int, kept: int) -> None:
    assert rules(keep=keep).budget(n, n) == kept
    assert rules(keep=keep, protocol="agnostic").budget(1000, n) == kept


def test_sinks_leave_the_last_token_a_place_and_recent_tokens_come_before_scores() -> None:
    assert protected(100, 50, 4, 64) == (4, 46)
    assert protected(100, 3, 4, 64) == (2, 1)
    assert protected(100, 1, 4, 64) == (0, 1)
    assert protected(100, 50, 4, 0) == (4, 0)


def test_kvc_04_ties_keep_the_older_token() -> None:
    kept = top_slots(torch.zeros(1, 9), 5, sinks=1, recent=1)
    assert kept.tolist() == [[0, 1, 2, 3, 8]]


def test_a_shared_budget_is_exact_and_every_head_is_safe() -> None:
    scores = torch.stack((torch.linspace(5, 6, 20), torch.linspace(0, 1, 20)))
    kept = top_slots_per_head(scores, 10, sinks=1, recent=1, safeguard=0.4)
    assert [len(k) for k in kept] == [16, 4]
    assert kept[1].tolist() == [0, 17, 18, 19]
    assert kept[0].tolist() == [0, *range(5, 20)]
    # Without rivalry it is the equal budget.
    equal = top_slots_per_head(scores, 10, 1, 1, safeguard=1.0)
    assert [e.tolist() for e in equal] == top_slots(scores, 10, 1, 1).tolist()


@pytest.mark.parametrize("keep", [1, 3])
def test_no_head_is_left_without_a_token(keep: int) -> None:
    scores = torch.stack((torch.linspace(5, 6, 8), torch.linspace(0, 1, 8)))
    kept = top_slots_per_head(scores, keep, sinks=0, recent=0, safeguard=0.0)
    assert [len(k) for k in kept] == [2 * keep - 1, 1]


@pytest.mark.parametrize("id", IDS)
def test_keys_name_method_and_every_option(bind: Callable[..., KVSelector], id: str) -> None:
    keys = {bind(id).key, bind(id, keep=0.25).key, bind(id, sinks=1).key, bind(id, protocol="agnostic").key}
    assert len(keys) == 4 and bind(id).key == bind(id).key
    assert bind(id).key.startswith(f"{id}/")


def test_needs_are_told(bind: Callable[..., KVSelector]) -> None:
    assert {id: bind(id).history for id in IDS} == {
        **dict.fromkeys(IDS, 0),
        "snapkv": 64,
        "h2o": None,
        "expected_attention": None,
    }
    assert [id for id in IDS if bind(id).per_head] == ["adacurdkv"]
    assert not any(bind(id).rerotates for id in IDS)
    assert bind("streaming_llm", rerotate=True).rerotates
