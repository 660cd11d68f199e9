"""Selectors under permutations, translations and lengths that nobody thought of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.core import catalog
from workbench.engine.selection import CachedLayer
from workbench.kv.curdkv import cur_scores
from workbench.kv.selection.leverage import (
    leverage_scores,
    normalised,
    projected_norms,
    projection,
    row_norms,
)
from workbench.kv.selection.rules import Rules
from workbench.kv.selection.topk import top_slots, top_slots_per_head
from workbench.kv.selection.weights import column_sums

shares = st.sampled_from([0.05, 0.1, 0.25, 0.5, 0.77, 1.0])
lengths = st.integers(1, 90)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    slots=lengths,
    heads=st.integers(1, 4),
    keep=lengths,
    sinks=st.integers(0, 8),
    recent=st.integers(0, 70),
    levels=st.integers(1, 1000),
    seed=st.integers(0, 99),
)
def test_numbers_are_exact_and_ends_are_kept(
    slots: int, heads: int, keep: int, sinks: int, recent: int, levels: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (heads, slots), generator=gen).double()  # with few levels: many ties
    kept = top_slots(scores, keep, sinks, recent)
    assert kept.shape == (heads, min(keep, slots))
    first = min(sinks, keep - 1, slots)
    last = min(recent, keep - first, slots - first)
    for h, row in enumerate(kept.tolist()):
        assert row == sorted(set(row)) and row[-1] < slots
        if keep >= slots:
            continue
        assert row[:first] == list(range(first)) and row[len(row) - last :] == list(
            range(slots - last, slots)
        )
        middle = set(row[first : len(row) - last])
        out = set(range(first, slots - last)) - middle
        # The worst kept beats the best dropped, or is as good and older.
        worst = min(((float(scores[h, i]), -i) for i in middle), default=None)
        best = max(((float(scores[h, i]), -i) for i in out), default=None)
        assert worst is None or best is None or worst > best


@given(
    slots=lengths,
    heads=st.integers(1, 4),
    keep=lengths,
    sinks=st.integers(0, 8),
    recent=st.integers(0, 70),
    safeguard=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_a_shared_budget_is_exact(
    slots: int, heads: int, keep: int, sinks: int, recent: int, safeguard: float, seed: int
) -> None:
    kept = top_slots_per_head(draw(heads, slots, seed=seed), keep, sinks, recent, safeguard)
    assert sum(map(len, kept)) == heads * min(keep, slots)
    for row in kept:
        assert row.tolist() == sorted(set(row.tolist()))
        assert len(row) >= min(slots, max(1, int(safeguard * keep + 1e-9)))  # and never none


@given(n=st.integers(5, 60), seed=st.integers(0, 99), which=st.sampled_from(["key", "value", "product"]))
def test_curdkv_scores_follow_a_permutation_of_the_tokens(n: int, seed: int, which: str) -> None:
    k, v = draw(2, n, 8, seed=seed), draw(2, n, 8, seed=seed + 100)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    matrix = projection(8, 5, seed, 0)
    for norms in (row_norms, leverage_scores, lambda x: projected_norms(x, matrix)):
        mine = cur_scores(k, v, norms, which)
        theirs = cur_scores(k[:, order], v[:, order], norms, which)
        torch.testing.assert_close(mine[:, order], theirs, rtol=1e-9, atol=1e-12)


@given(n=st.integers(9, 60), seed=st.integers(0, 99))
def test_leverage_knows_the_column_space_only(n: int, seed: int) -> None:
    """Any invertible change of basis leaves it alone; row norms are not so."""
    x = draw(1, n, 6, seed=seed)
    basis = draw(6, 6, seed=seed + 500) + 4 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(leverage_scores(x @ basis), leverage_scores(x), rtol=1e-6, atol=1e-9)
    assert not torch.allclose(normalised(row_norms(x @ basis)), normalised(row_norms(x)), rtol=1e-3)


@given(n=st.integers(2, 50), rows=st.integers(1, 50), seed=st.integers(0, 99), shift=st.floats(-50, 50))
def test_attention_sums_ignore_what_all_keys_share(n: int, rows: int, seed: int, shift: float) -> None:
    """A vector added to every key shifts a query's logits alike, and softmax does not see that."""
    rows = min(rows, n)
    k, q = draw(2, n, 8, seed=seed), draw(rows, 4, 8, seed=seed + 100)
    sums = column_sums(q, k)
    torch.testing.assert_close(column_sums(q, k + shift * draw(8, seed=seed + 7)), sums, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(sums.sum(1), torch.full((2,), float(rows), dtype=torch.float64))


@given(
    at=st.integers(0, 500),
    prompt=st.integers(1, 200),
    share=shares,
    interval=st.integers(0, 40),
    data=st.data(),
)
def test_points_are_those_of_a_list(at: int, prompt: int, share: float, interval: int, data: Any) -> None:
    context = data.draw(st.integers(1, prompt))
    for protocol in ("aware", "agnostic"):
        rules = Rules(share, 4, 0, protocol, interval)
        first = prompt if protocol == "aware" else context
        points = [first + i * interval for i in range(600 if interval else 1)]
        assert rules.next(at, prompt, context) == next((p for p in points if p > at), None)
        assert 1 <= rules.budget(prompt, context) <= first


@pytest.mark.parametrize("id", [i for i in catalog.MODULES if catalog.get(i).spec.seam == "kv_selector"])
@given(n=lengths, share=shares, sinks=st.integers(0, 6), chunk=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_selector_keeps_its_budget_whatever_the_chunks(
    lab: Any, id: str, n: int, share: float, sinks: int, chunk: int, seed: int
) -> None:
    technique = catalog.get(id)
    config = technique.configure({"keep": share, "sinks": sinks})
    context = SimpleNamespace(config=lab.random_source("llama").config)
    dim = context.config.head_dim
    k, v, q = draw(2, n, dim, seed=seed), draw(2, n, dim, seed=seed + 1), draw(n, 4, dim, seed=seed + 2)
    positions = torch.arange(n)

    def cached(slots: int) -> CachedLayer:
        return CachedLayer(k[:, :slots], v[:, :slots], positions[:slots].expand(2, -1))

    def kept(size: int) -> list[list[int]]:
        selection = technique.bind(config, context).begin(n, n)
        for begin in range(0, n, size):
            end = min(begin + size, n)
            selection.observe(0, q[begin:end], positions[begin:end], lambda end=end: cached(end))
        return [s.tolist() for s in selection.keep(0, cached(n))]

    found = kept(chunk)
    assert found == kept(n)
    assert sum(map(len, found)) == 2 * max(1, int(share * n + 1e-9))
