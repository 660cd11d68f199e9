"""What every selection owes the engine: exact numbers, chunks that do not matter, copies, typed errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.engine.selection import KVSelector
from workbench.kv.selection.blocks import SIZE
from workbench.spec.errors import InvariantError, RequestError

Bind = Callable[..., KVSelector]
Make = Callable[..., Any]
IDS = ("adacurdkv", "curdkv", "expected_attention", "h2o", "knorm", "snapkv", "streaming_llm", "random")
WITH_STATE = ("expected_attention", "h2o", "snapkv")
each = pytest.mark.parametrize("id", IDS)


def select(bind: Bind, t: Any, id: str, chunk: int = 10**6, **options: Any) -> list[list[int]]:
    n = t.keys.shape[1]
    selection = bind(id, **options).begin(n, n)
    t.observe(selection, chunk)
    return [k.tolist() for k in selection.keep(0, t.cached())]


@each
@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 64, 65, 70])
@pytest.mark.parametrize("keep", [0.05, 0.5, 1.0])
def test_budgets_are_exact_for_every_length(
    make_tokens: Make, bind: Bind, id: str, n: int, keep: float
) -> None:
    kept = select(bind, make_tokens(n), id, keep=keep)
    budget = max(1, int(keep * n + 1e-9))
    assert sum(map(len, kept)) == 2 * budget
    if id != "adacurdkv":
        assert [len(k) for k in kept] == [budget] * 2
    for slots in kept:
        assert slots == sorted(set(slots))
        assert min(slots) >= 0 and max(slots) < n
        if budget > 4:
            assert slots[:4] == [0, 1, 2, 3]


@each
def test_kept_slots_are_int64_and_heads_choose_for_themselves(make_tokens: Make, bind: Bind, id: str) -> None:
    t = make_tokens(100)
    selection = bind(id, keep=0.8).begin(100, 100)
    t.observe(selection, 100)
    kept = selection.keep(0, t.cached())
    assert all(k.dtype == torch.int64 for k in kept)
    if id != "streaming_llm":
        assert kept[0].tolist() != kept[1].tolist()


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("n", [1, 10, 64, 65])
def test_kvc_04_a_window_meets_a_prompt_no_longer_than_itself(
    make_tokens: Make, bind: Bind, n: int, sinks: int
) -> None:
    for kept in select(bind, make_tokens(n), "snapkv", keep=0.5, sinks=sinks):
        assert kept[-1] == n - 1
        assert len(kept) == max(1, n // 2)
        inside = [s for s in kept if s >= n - 64]
        assert sinks or inside == kept
        assert set(kept) <= {*inside, *range(sinks)}


@pytest.mark.parametrize("id", ["snapkv", "curdkv", "knorm", "expected_attention", "adacurdkv"])
def test_recent_tokens_are_kept(make_tokens: Make, bind: Bind, id: str) -> None:
    for kept in select(bind, make_tokens(80), id, keep=0.4, recent=10):
        assert kept[-10:] == list(range(70, 80))


@pytest.mark.parametrize("id", ["snapkv", "h2o", "expected_attention"])
def test_kvc_06_the_order_of_query_heads_in_a_group_does_not_matter(
    make_tokens: Make, bind: Bind, id: str
) -> None:
    t = make_tokens(64, group=4, dim=8, dtype=torch.float64)
    before = select(bind, t, id, recent=8) if id == "snapkv" else select(bind, t, id)
    t.queries = t.queries[:, [2, 0, 3, 1, 5, 4, 7, 6]]
    after = select(bind, t, id, recent=8) if id == "snapkv" else select(bind, t, id)
    assert before == after
    t.queries = t.queries[:, [4, 5, 6, 7, 0, 1, 2, 3]]  # across groups it does
    assert (select(bind, t, id, recent=8) if id == "snapkv" else select(bind, t, id)) != before


@pytest.mark.parametrize("id", WITH_STATE)
def test_chunks_do_not_matter_to_a_bit(make_tokens: Make, bind: Bind, id: str) -> None:
    """Scores themselves, not only what is kept: near ties would show otherwise."""
    t = make_tokens(3 * SIZE + 11, group=3, dim=8)
    t_queries = t.queries
    n = t.keys.shape[1]

    def state(chunk: int) -> list[torch.Tensor]:
        selection: Any = bind(id).begin(n, n)
        t.observe(selection, chunk)
        if id == "h2o":
            kept = selection.keep(0, t.cached())
            return [*kept, selection._sums[0]]
        if id == "expected_attention":
            for block in selection._blocks[0].rest():
                selection._add(0, block)
            moments = selection._moments[0]
            return [moments.total, moments.products, *selection.keep(0, t.cached())]
        return [selection._queries[0], *selection.keep(0, t.cached())]

    whole = state(n)
    for chunk in (1, 7, SIZE, 50):
        assert all(torch.equal(a, b) for a, b in zip(whole, state(chunk), strict=True)), chunk
    assert t.queries is t_queries


@pytest.mark.parametrize("id", WITH_STATE)
def test_a_fork_goes_its_own_way(make_tokens: Make, bind: Bind, id: str) -> None:
    t, other = make_tokens(75), make_tokens(75, seed=9)
    selector = bind(id, **({"recent": 16} if id == "snapkv" else {}))
    first = selector.begin(75, 75)
    t.observe(first, 20, 0, 50)
    second = first.fork()
    held = second.nbytes()
    assert held == first.nbytes() > 0
    other.observe(second, 20, 50, 75)
    t.observe(first, 20, 50, 75)
    expected = selector.begin(75, 75)
    t.observe(expected, 20)
    mine, theirs, alone = ([k.tolist() for k in s.keep(0, t.cached())] for s in (first, second, expected))
    assert mine == alone and theirs != mine


@pytest.mark.parametrize("id", WITH_STATE)
def test_state_is_small_and_goes_once_it_was_used(make_tokens: Make, bind: Bind, id: str) -> None:
    t = make_tokens(200)
    selection = bind(id, keep=0.1).begin(200, 200)
    t.observe(selection, 200)
    before = selection.nbytes()
    # Moments hold a matrix per query head; sums a number per slot; a window its queries.
    assert 0 < before <= 4 * (8 + 64) * 8 + SIZE * (4 * 8 * 4 + 8) + 2 * 200 * 8 + 64 * 4 * 8 * 4
    selection.keep(0, t.cached())
    assert selection.nbytes() == (2 * 20 * 8 if id == "h2o" else 0)


@each
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_name_the_layer(
    make_tokens: Make, bind: Bind, id: str, bad: float
) -> None:
    if id in ("streaming_llm", "random"):
        pytest.skip("looks at positions only")
    t = make_tokens(80)
    t.keys[1, 9, 3] = bad
    selection = bind(id).begin(80, 80)

    def observe() -> None:
        for begin in (0, 40):
            at = slice(begin, begin + 40)
            cached = t.cached(begin + 40)
            selection.observe(17, t.queries[at], t.positions[at], lambda cached=cached: cached)

    with pytest.raises(RequestError, match="layer 17"):
        observe()
        selection.keep(17, t.cached())


@pytest.mark.parametrize("form", ["projected", "rows", "leverage"])
def test_true_leverage_refuses_nan_too(make_tokens: Make, bind: Bind, form: str) -> None:
    t = make_tokens(40)
    t.values[0, 5, 2] = float("nan")
    with pytest.raises(RequestError, match="layer 0"):
        select(bind, t, "curdkv", form=form)


def test_a_budget_of_nothing_is_a_bug() -> None:
    from workbench.kv.selection.topk import top_slots

    with pytest.raises(InvariantError):
        top_slots(torch.zeros(1, 4), 0, 0, 0)


@each
def test_equal_seeds_keep_equal_slots(make_tokens: Make, bind: Bind, id: str) -> None:
    t = make_tokens(90)
    assert select(bind, t, id, keep=0.3) == select(bind, t, id, keep=0.3)


@pytest.mark.parametrize("id", ["curdkv", "adacurdkv", "random"])
def test_another_seed_is_another_draw(make_tokens: Make, bind: Bind, id: str) -> None:
    t = make_tokens(90, dim=64)
    assert select(bind, t, id, keep=0.3, seed=1) != select(bind, t, id, keep=0.3, seed=2)


class Largest(TorchDispatchMode):
    """The most elements that any result has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("form", ["projected", "rows", "leverage"])
@pytest.mark.parametrize("id", ["curdkv", "adacurdkv"])
def test_no_matrix_of_tokens_by_tokens_is_formed(make_tokens: Make, bind: Bind, id: str, form: str) -> None:
    n = 600
    t = make_tokens(n, kv_heads=1, group=1)
    with Largest() as seen:
        select(bind, t, id, form=form)
    assert n <= seen.elements <= n * 20
    with Largest() as seen:
        _ = t.keys @ t.keys.transpose(1, 2)
    assert seen.elements == n * n


@pytest.mark.parametrize("id", ["h2o", "snapkv", "expected_attention"])
def test_attention_is_formed_for_a_block_of_queries_at_a_time(make_tokens: Make, bind: Bind, id: str) -> None:
    n = 700
    t = make_tokens(n, kv_heads=1, group=1)
    with Largest() as seen:
        select(bind, t, id)
    assert seen.elements <= n * 64


def test_bfloat16_caches_are_scored_in_float32(make_tokens: Make, bind: Bind) -> None:
    t = make_tokens(60, dtype=torch.bfloat16)
    up = make_tokens(60, dtype=torch.bfloat16)
    up.keys, up.values, up.queries = up.keys.float(), up.values.float(), up.queries.float()
    for id in IDS:
        assert select(bind, t, id) == select(bind, up, id)
