"""The plain Triton attention against float64: every mask, head size, page size and view of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels.attention.fa_fwd import fa_fwd
from workbench.kernels.attention.problem import Attended, checked, reference
from workbench.spec.errors import UnsupportedInput

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Draw = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("poisoned")  # a result that nobody wrote shows


def error(x: Tensor, of: Tensor) -> float:
    return float((x.double() - of.double()).norm() / of.double().norm())


def check(found: Attended, q: Tensor, k: Tensor, v: Tensor, q_lens: Any, kv_lens: Any, **kw: Any) -> None:
    """At most twice the error of the plain path of the same dtype, and an LSE good to 1e-5."""
    problem = checked(q, k, v, q_lens, kv_lens, **kw)
    exact, lse = reference(q, k, v, problem)
    plain, _ = reference(q, k, v, problem, q.dtype)
    assert found.out.isfinite().all()
    assert error(found.out, exact) <= 2 * error(plain, exact) + 1e-6
    torch.testing.assert_close(found.lse, lse.float(), rtol=1e-5, atol=1e-5)


def run(draw: Draw, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, **kw: Any) -> None:
    dtype = kw.pop("dtype", BF16)
    q = draw(sum(q_lens), heads, dim, dtype=dtype)
    k, v = (draw(sum(kv_lens), kv_heads, dim, dtype=dtype) for _ in range(2))
    check(fa_fwd(q, k, v, q_lens, kv_lens, **kw), q, k, v, q_lens, kv_lens, **kw)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "options"),
    [
        ([256], [256], 1, 1, 128, {"causal": False}),
        ([130], [330], 2, 2, 128, {}),
        ([100], [300], 1, 1, 256, {}),
        ([1, 17, 63, 65, 130], [1, 17, 63, 65, 130], 1, 1, 64, {}),
        ([5, 1, 70], [300, 129, 70], 4, 1, 64, {}),
        ([64], [128], 8, 1, 64, {}),
        ([200], [400], 1, 1, 64, {"window": 1}),
        ([200], [700], 2, 1, 64, {"window": 150}),
        ([20], [30], 1, 1, 64, {"window": 1000}),
        ([200], [300], 1, 1, 64, {"softcap": 2.0}),
        ([200], [300], 1, 1, 64, {"softcap": 30.0, "window": 64, "scale": 0.3}),
        ([130], [130], 1, 1, 64, {"dtype": FP16}),
        ([130], [200], 2, 1, 64, {"dtype": FP32}),
        ([64], [64], 1, 1, 128, {"causal": False, "dtype": FP32}),
    ],
)
def test_shapes_masks_and_dtypes(
    draw: Draw, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    run(draw, q_lens, kv_lens, heads, kv_heads, dim, **options)


@pytest.mark.parametrize("dim", [40, 63, 80, 96])
@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_att_07_head_sizes_between_powers_of_two(draw: Draw, dim: int, tokens: int) -> None:
    run(draw, [tokens], [tokens], 1, 1, dim, dtype=FP32)


def test_att_01_the_mask_is_anchored_at_the_bottom_right(device: str) -> None:
    q, k = torch.zeros(2, 1, 64, device=device), torch.zeros(5, 1, 64, device=device)
    v = torch.arange(1.0, 6.0, device=device)[:, None, None].expand(5, 1, 64).contiguous()
    assert fa_fwd(q, k, v, [2], [5]).out[:, 0, 0].tolist() == [2.5, 3.0]


def test_att_03_rows_without_a_key_are_zero_and_no_neighbour_notices(draw: Draw) -> None:
    q, k, v = draw(300, 1, 64), draw(100, 1, 64), draw(100, 1, 64)
    found = fa_fwd(q, k, v, [300], [100])
    assert found.out[:200].count_nonzero() == 0 and found.lse[:, :200].isneginf().all()
    check(found, q, k, v, [300], [100])
    empty = fa_fwd(q, k[:0], v[:0], [300], [0])
    assert empty.out.count_nonzero() == 0 and empty.lse.isneginf().all()


@pytest.mark.parametrize("page", [1, 16, 48, 96])
def test_att_04_what_lies_behind_the_end_of_a_page_is_never_seen(draw: Draw, page: int) -> None:
    kv_lens = [2 * page + page // 2 + 1, 3 * page]
    q, k, v = draw(23, 2, 64), draw(9, 1, page, 64), draw(9, 1, page, 64)
    table = torch.tensor([[3, 0, 5, 99], [1, 4, 6, 99]], dtype=torch.int32, device=q.device)
    q_lens, outs = [20, 3], []
    for filler in (float("nan"), float("inf"), 0.0):
        for x in (k, v):
            x[5, :, page // 2 + 1 :] = filler
            x[[2, 7, 8]] = filler
        outs.append(fa_fwd(q, k, v, q_lens, kv_lens, table=table))
    assert all(torch.equal(outs[0].out, other.out) for other in outs)
    check(outs[0], q, k, v, q_lens, kv_lens, table=table)


def test_att_06_views_of_a_fused_buffer_and_transposed_heads(draw: Draw) -> None:
    fused = draw(90, 3, 2, 64)
    q, k, v = fused.unbind(1)
    before = fused.clone()
    found = fa_fwd(q, k, v, [90], [90])
    check(found, q, k, v, [90], [90])
    assert torch.equal(fused, before)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(fa_fwd(*by_head, [90], [90]).out, found.out)
    with pytest.raises(UnsupportedInput, match="contiguous"):
        fa_fwd(q, k, draw(90, 64, 2).mT, [90], [90])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_att_08_low_precision_is_judged_by_its_own_plain_path(draw: Draw, dtype: torch.dtype) -> None:
    q, k, v = (draw(256, 1, 64, dtype=dtype) for _ in range(3))
    problem = checked(q, k, v, [256], [256])
    exact, _ = reference(q, k, v, problem)
    plain, _ = reference(q, k, v, problem, dtype)
    worst = (fa_fwd(q, k, v, [256], [256]).out.double() - exact).abs().max()
    assert worst <= 2 * (plain.double() - exact).abs().max() + 1e-5


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_sequences_do_not_touch_each_other(draw: Draw) -> None:
    q, k, v = draw(140, 1, 64), draw(140, 1, 64), draw(140, 1, 64)
    for x in (q, k, v):
        x[70:] = float("nan")
    found = fa_fwd(q, k, v, [70, 70], [70, 70])
    alone = [x[:70].clone() for x in (q, k, v)]
    check(Attended(found.out[:70], found.lse[:, :70], found.path), *alone, [70], [70])
    assert found.out[70:].isnan().all()


def test_bad_input_is_refused_with_the_way_out(draw: Draw) -> None:
    x = draw(8, 1, 64)
    for call, match in (
        (lambda: fa_fwd(x.double(), x.double(), x.double(), [8], [8]), "takes bf16"),
        (lambda: fa_fwd(*[draw(8, 1, 300)] * 3, [8], [8]), "takes bf16"),
        (lambda: fa_fwd(x, x, x, [7], [8]), "Lengths"),
        (lambda: fa_fwd(x, x, x, [8], [8], causal=False, window=3), "window"),
        (lambda: fa_fwd(x, x, x[:, :, None], [8], [8]), "belong together"),
    ):
        with pytest.raises(UnsupportedInput, match=match) as caught:
            call()
        assert caught.value.hint
