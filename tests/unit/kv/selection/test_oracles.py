"""Each score against the paper's formula, written slowly in float64 without the package's own code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workbench.engine.selection import KVSelector
from workbench.kv.curdkv import cur_scores
from workbench.kv.expected_attention import expected_scores
from workbench.kv.selection.leverage import (
    leverage_scores,
    normalised,
    projected_norms,
    projection,
    row_norms,
)
from workbench.kv.selection.unrotate import Rotation
from workbench.kv.selection.weights import column_sums
from workbench.kv.snapkv import snap_scores
from workbench.models.config import FULL, ModelConfig
from workbench.models.rope import frequencies

Bind = Callable[..., KVSelector]
Make = Callable[..., Any]


def attention(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Weights [Hq, n, S] of the last n tokens, one row at a time."""
    n, heads, _ = queries.shape
    kv_heads, slots, _ = keys.shape
    out = np.zeros((heads, n, slots))
    for h in range(heads):
        own = keys[h // (heads // kv_heads)]
        for i in range(n):
            seen = slots - n + i + 1
            logits = np.array([float(queries[i, h] @ own[j]) for j in range(seen)])
            e = np.exp(logits - logits.max())
            out[h, i, :seen] = e / e.sum()
    return out


def wide(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


@pytest.mark.parametrize(("n", "slots"), [(1, 1), (1, 6), (5, 5), (4, 13)])
def test_column_sums(make_tokens: Make, n: int, slots: int) -> None:
    t = make_tokens(slots, dtype=torch.float64)
    weights = attention(wide(t.queries[-n:]), wide(t.keys))
    expected = weights.sum(1).reshape(2, 2, slots).mean(1)
    got = column_sums(t.queries[-n:], t.keys)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
    assert float(got.sum()) == pytest.approx(2 * n)


@pytest.mark.parametrize("pool", [1, 3, 5])
def test_snapkv_scores(make_tokens: Make, pool: int) -> None:
    t = make_tokens(40, dtype=torch.float64)
    window, prefix = 8, 32
    weights = attention(wide(t.queries[-window:]), wide(t.keys))[:, :, :prefix]
    votes = weights.mean(1)
    pooled = np.zeros_like(votes)
    for h in range(len(votes)):
        for j in range(prefix):
            near = [votes[h, i] if 0 <= i < prefix else 0.0 for i in range(j - pool // 2, j + pool // 2 + 1)]
            pooled[h, j] = sum(near) / pool
    expected = pooled.reshape(2, 2, prefix).mean(1)
    got = snap_scores(t.queries[-window:], t.keys, pool)
    np.testing.assert_allclose(got[:, :prefix].numpy(), expected, atol=1e-12)
    assert not got[:, prefix:].any()


def test_snapkv_keeps_what_the_oracle_keeps(make_tokens: Make, bind: Bind) -> None:
    t = make_tokens(60)
    selection = bind("snapkv", keep=0.5, recent=8, sinks=2).begin(60, 60)
    t.observe(selection, 60)
    kept = selection.keep(0, t.cached())
    scores = snap_scores(t.queries[-8:].double(), t.keys.double(), 5)
    for h in range(2):
        middle = sorted(range(2, 52), key=lambda j: -float(scores[h, j]))[:20]
        assert kept[h].tolist() == sorted([0, 1, *middle, *range(52, 60)])


def test_h2o_follows_the_algorithm_step_by_step(make_tokens: Make, bind: Bind) -> None:
    """Prompt of 12, budget 6, then one eviction per decoded token, as in algorithm 1."""
    t = make_tokens(20, seed=3)
    selection = bind("h2o", keep=0.5, sinks=0, interval=1).begin(12, 12)
    t.observe(selection, 12, 0, 12)
    sums = attention(wide(t.queries[:12]), wide(t.keys[:, :12])).sum(1).reshape(2, 2, 12).mean(1)
    alive = [list(range(12)) for _ in range(2)]
    score = [{j: sums[h, j] for j in range(12)} for h in range(2)]

    def evict() -> None:
        for h in range(2):
            heavy = alive[h][:-3]
            best = sorted(heavy, key=lambda j: -score[h][j])[:3]
            alive[h] = sorted(best) + alive[h][-3:]

    def compare(kept: Any, slots: list[list[int]]) -> list[list[int]]:
        got = [[slots[h][i] for i in kept[h].tolist()] for h in range(2)]
        assert got == alive
        return got

    evict()
    slots = compare(selection.keep(0, t.cached(12)), [list(range(12))] * 2)
    for step in range(12, 20):
        slots = [[*s, step] for s in slots]
        layer = layer_of(t, slots)
        selection.observe(0, t.queries[step : step + 1], torch.tensor([step]), lambda layer=layer: layer)
        for h in range(2):
            alive[h].append(step)
            score[h][step] = 0.0
            own = wide(t.keys[h, alive[h]])
            weights = attention(wide(t.queries[step : step + 1, 2 * h : 2 * h + 2]), own[None])
            for j, w in zip(alive[h], weights[:, 0].mean(0), strict=True):
                score[h][j] += w
        evict()
        slots = compare(selection.keep(0, layer), slots)


def layer_of(t: Any, slots: list[list[int]]) -> Any:
    from workbench.engine.selection import CachedLayer

    index = torch.tensor(slots)
    rows = [torch.stack([x[h, index[h]] for h in range(len(slots))]) for x in (t.keys, t.values)]
    return CachedLayer(rows[0], rows[1], index)


def rotation_matrix(config: ModelConfig, position: int) -> np.ndarray:
    """What multiplies an unrotated column vector at a position, attention factor included."""
    spec = dict(config.rope).get(FULL, config.rope[0][1])
    dim = config.head_dim
    w = frequencies(spec, dim, config.max_position).numpy()
    r = np.zeros((dim, dim))
    for i in range(dim // 2):
        c, s = math.cos(position * w[i]), math.sin(position * w[i])
        r[i, i], r[i, i + dim // 2] = c, -s
        r[i + dim // 2, i], r[i + dim // 2, i + dim // 2] = s, c
    return r * spec.attention_factor


def test_rotations_are_undone_and_averaged(make_tokens: Make, model_config: ModelConfig) -> None:
    t = make_tokens(5, dtype=torch.float64)
    rotation = Rotation(model_config)
    assert dict(model_config.rope).popitem()[1].attention_factor != 1
    at = torch.tensor([0, 3, 77, 500, 1023])
    turned = np.stack(
        [wide(t.queries[i]) @ rotation_matrix(model_config, int(p)).T for i, p in enumerate(at)]
    )
    np.testing.assert_allclose(
        rotation.undo(torch.from_numpy(turned), at).numpy(), t.queries.numpy(), atol=1e-12
    )
    cos, sin = rotation.ahead(1000, 512)  # the model ends at 1024
    mean = np.mean([rotation_matrix(model_config, p) for p in range(1000, 1024)], 0)
    np.testing.assert_allclose(cos.numpy(), np.diag(mean), atol=1e-12)
    np.testing.assert_allclose(sin.numpy()[4:], np.diag(mean[4:, :4]), atol=1e-12)


@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention(
    make_tokens: Make, bind: Bind, model_config: ModelConfig, covariance: bool
) -> None:
    t = make_tokens(50, seed=5, dtype=torch.float64)
    selector = bind("expected_attention", keep=0.4, sinks=4, future=20, covariance=covariance, epsilon=0.01)
    selection = selector.begin(50, 50)
    t.observe(selection, 50)
    kept = selection.keep(0, t.cached())
    factor = dict(model_config.rope).popitem()[1].attention_factor
    plain = np.zeros((50, 4, 8))
    for i in range(50):
        inverse = rotation_matrix(model_config, i).T / factor**2
        plain[i] = wide(t.queries[i]) @ inverse.T
    ahead = np.mean([rotation_matrix(model_config, p) for p in range(50, 70)], 0)
    for h in range(2):
        score = np.zeros(46)
        for q in (2 * h, 2 * h + 1):
            mu = ahead @ plain[4:, q].mean(0)
            sigma = ahead @ np.cov(plain[4:, q].T, bias=True) @ ahead.T
            logits = [float(k @ mu + (k @ sigma @ k / 2 if covariance else 0.0)) for k in wide(t.keys[h, 4:])]
            e = np.exp(np.array(logits) - max(logits))
            score += e / e.sum() / 2
        score = (score + 0.01) * np.linalg.norm(wide(t.values[h, 4:]), axis=1)
        best = sorted(range(46), key=lambda j: -score[j])[:16]
        assert kept[h].tolist() == [0, 1, 2, 3, *sorted(j + 4 for j in best)]


def test_expected_weights_are_those_of_many_drawn_queries() -> None:
    """E[exp(q.k)] of a Gaussian in closed form, against 200,000 draws."""
    gen = torch.Generator().manual_seed(1)
    k = torch.randn(1, 6, 4, generator=gen, dtype=torch.float64) * 0.7
    mean = torch.randn(1, 4, generator=gen, dtype=torch.float64) * 0.5
    root = torch.randn(4, 4, generator=gen, dtype=torch.float64) * 0.4
    draws = mean + torch.randn(200_000, 4, generator=gen, dtype=torch.float64) @ root.T
    expected = (draws @ k[0].T).exp().mean(0)
    ones = torch.ones(1, 6, 1, dtype=torch.float64)
    got = expected_scores(k, ones, mean, (root @ root.T)[None], 0.0)
    torch.testing.assert_close(got[0], expected / expected.sum(), rtol=0.03, atol=0)


def test_knorm_keeps_short_keys(make_tokens: Make, bind: Bind) -> None:
    t = make_tokens(20)
    kept = bind("knorm", keep=0.5, sinks=2).begin(20, 20).keep(0, t.cached())
    for h in range(2):
        short = sorted(range(2, 20), key=lambda j: math.sqrt(sum(float(x) ** 2 for x in t.keys[h, j])))
        assert kept[h].tolist() == sorted([0, 1, *short[:8]])


def test_streaming_keeps_both_ends(make_tokens: Make, bind: Bind) -> None:
    kept = bind("streaming_llm", keep=0.5).begin(20, 20).keep(0, make_tokens(20).cached())
    assert [k.tolist() for k in kept] == [[*range(4), *range(14, 20)]] * 2


def test_row_norms_projected_norms_and_leverage(make_tokens: Make) -> None:
    x = make_tokens(30, dtype=torch.float64).keys
    for h in range(2):
        rows = wide(x[h])
        np.testing.assert_allclose(row_norms(x)[h].numpy(), [(r * r).sum() for r in rows])
        g = wide(projection(8, 5, seed=3, layer=2))
        np.testing.assert_allclose(
            projected_norms(x, projection(8, 5, 3, 2))[h].numpy(), [((r @ g) ** 2).sum() for r in rows]
        )
        q, _ = np.linalg.qr(rows)
        np.testing.assert_allclose(leverage_scores(x)[h].numpy(), (q * q).sum(1), atol=1e-12)
    assert leverage_scores(x).sum(1).tolist() == pytest.approx([8, 8])


def test_leverage_of_a_matrix_without_full_rank_is_that_of_its_columns_alone(make_tokens: Make) -> None:
    x = make_tokens(30).keys
    x = torch.cat((x[..., :4], x[..., :4] @ torch.randn(4, 4)), -1)
    assert leverage_scores(x).sum(1).tolist() == pytest.approx([4, 4])
    assert not leverage_scores(torch.zeros(1, 3, 8)).any()
    assert leverage_scores(torch.eye(3)[None]).tolist() == [pytest.approx([1, 1, 1])]


def test_projection_keeps_norms_on_average_and_depends_on_seed_and_layer() -> None:
    g = torch.stack([projection(64, 20, seed, 0) for seed in range(400)])
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert float((x @ g).square().sum(-1).mean() / x.square().sum()) == pytest.approx(1, abs=0.05)
    assert torch.equal(projection(8, 5, 1, 2), projection(8, 5, 1, 2))
    assert not torch.equal(projection(8, 5, 1, 2), projection(8, 5, 1, 3))
    assert not torch.equal(projection(8, 5, 1, 2), projection(8, 5, 2, 2))


def test_local_windows_each_sum_to_one() -> None:
    scores = normalised(torch.arange(1.0, 39.0).repeat(2, 1), 16)
    assert [float(scores[0, a:b].sum()) for a, b in ((0, 16), (16, 32), (32, 38))] == pytest.approx([1, 1, 1])
    assert normalised(torch.zeros(1, 4)).tolist() == [[0.25] * 4]
    whole = normalised(torch.arange(1.0, 39.0).repeat(2, 1))
    assert whole.sum(1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("which", ["key", "value", "product"])
def test_curdkv_scores(make_tokens: Make, which: str) -> None:
    t = make_tokens(25, dtype=torch.float64)
    got = cur_scores(t.keys, t.values, row_norms, which)
    for h in range(2):
        k, v = ([float((r * r).sum()) for r in wide(x[h])] for x in (t.keys, t.values))
        raw = {"key": k, "value": v, "product": [a * b for a, b in zip(k, v, strict=True)]}[which]
        np.testing.assert_allclose(got[h].numpy(), np.array(raw) / sum(raw))


@pytest.mark.parametrize("which", ["key", "value", "product"])
def test_curdkv_scores_of_windows(make_tokens: Make, which: str) -> None:
    """Each side is a share of its own window of four slots, the last one short, before sides are joined."""
    t = make_tokens(10, dtype=torch.float64)
    got = cur_scores(t.keys, t.values, row_norms, which, local=4)
    for h in range(2):
        shares = []
        for x in (t.keys, t.values):
            raw = [float((r * r).sum()) for r in wide(x[h])]
            parts = [raw[0:4], raw[4:8], raw[8:10]]
            shares.append([r / sum(p) for p in parts for r in p])
        k, v = shares
        joined = {"key": k, "value": v, "product": [a * b for a, b in zip(k, v, strict=True)]}[which]
        np.testing.assert_allclose(got[h].numpy(), np.array(joined) / sum(joined))


def test_adacurdkv_ranks_heads_together(make_tokens: Make, bind: Bind) -> None:
    t = make_tokens(40, seed=2)
    t.values[0, 7] *= 30  # one heavy row: the rest of head 0 looks light beside it
    kept = bind("adacurdkv", keep=0.5, sinks=2, form="rows", safeguard=0.2).begin(40, 40).keep(0, t.cached())
    assert sum(map(len, kept)) == 40 and len(kept[0]) < len(kept[1])
    scores = cur_scores(t.keys.double(), t.values.double(), row_norms, "product")
    pool = []
    for h in range(2):
        order = sorted(range(2, 40), key=lambda j: -float(scores[h, j]))
        assert set(order[:2]) | {0, 1} <= set(kept[h].tolist())
        pool += [(float(scores[h, j]), h, j) for j in order[2:]]
    best = sorted(pool, reverse=True)[: 40 - 2 * 4]
    for h in range(2):
        order = sorted(range(2, 40), key=lambda j: -float(scores[h, j]))
        assert kept[h].tolist() == sorted({0, 1, *order[:2], *(j for _, g, j in best if g == h)})
