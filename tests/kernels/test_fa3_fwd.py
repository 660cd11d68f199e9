"""FlashAttention-3 in Gluon: numbers under nine adversarial schedules, and mutants that must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels.attention import fa3_kernel, fa3_parts, fa3_schedule
from workbench.kernels.attention.fa3_fwd import BUILDS, KERNEL, fa3_fwd
from workbench.kernels.attention.problem import Attended, checked, reference
from workbench.kernels.attention.work import cost, planned, visible_pairs, work_list
from workbench.kernels.emulator import SCHEDULES, Deadlock, Emulator, EmulatorError, Race
from workbench.spec.errors import UnsupportedInput

BF16, FP16 = torch.bfloat16, torch.float16
Draw = Callable[..., Tensor]


@pytest.fixture
def draw(generator: torch.Generator) -> Draw:
    def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return drawn


pytestmark = pytest.mark.usefixtures("poisoned")  # a result that nobody wrote shows


def error(x: Tensor, of: Tensor) -> float:
    return float((x.double() - of.double()).norm() / of.double().norm())


def check(found: Attended, q: Tensor, k: Tensor, v: Tensor, q_lens: Any, kv_lens: Any, **kw: Any) -> None:
    """At most twice the error of the plain path of the same dtype, and an LSE good to 1e-5."""
    problem = checked(q, k, v, q_lens, kv_lens, **kw)
    exact, lse = reference(q, k, v, problem)
    plain, _ = reference(q, k, v, problem, q.dtype)
    assert found.out.isfinite().all()
    assert error(found.out, exact) <= 2 * error(plain, exact) + 1e-5
    torch.testing.assert_close(found.lse, lse.float(), rtol=1e-5, atol=1e-5)


def run(draw: Draw, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, **kw: Any) -> None:
    dtype = kw.pop("dtype", BF16)
    emulator = kw.pop("emulator", Emulator())
    switches = {name: kw.pop(name) for name in ("pingpong", "early_wait") if name in kw}
    q = draw(sum(q_lens), heads, dim, dtype=dtype)
    k, v = (draw(sum(kv_lens), kv_heads, dim, dtype=dtype) for _ in range(2))
    found = fa3_fwd(q, k, v, q_lens, kv_lens, emulator=emulator, **switches, **kw)
    check(found, q, k, v, q_lens, kv_lens, **kw)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_numbers_hold_under_every_schedule(draw: Draw, schedule: Any) -> None:
    run(draw, [300, 20], [460, 20], 2, 1, 64, emulator=Emulator(schedule))


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "options"),
    [
        ([256], [256], 1, 1, 128, {"causal": False}),
        ([130], [515], 2, 2, 128, {}),
        ([256], [256], 1, 1, 256, {}),
        ([1, 17, 63, 65, 130], [1, 17, 63, 65, 130], 1, 1, 64, {}),
        ([5, 1, 128], [700, 129, 128], 4, 1, 64, {}),
        ([64], [128], 8, 1, 64, {}),
        ([200], [400], 1, 1, 64, {"window": 1}),
        ([200], [700], 1, 1, 64, {"window": 150}),
        ([200], [300], 1, 1, 64, {"softcap": 2.0}),
        ([200], [300], 1, 1, 64, {"softcap": 30.0, "window": 64, "scale": 0.3}),
        ([130], [130], 1, 1, 64, {"dtype": FP16}),
        ([150], [400], 2, 1, 64, {"pingpong": False}),
        ([150], [400], 2, 1, 64, {"early_wait": False}),
    ],
)
def test_shapes_masks_and_switches(
    draw: Draw, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    run(draw, q_lens, kv_lens, heads, kv_heads, dim, **options)


def test_att_01_the_mask_is_anchored_at_the_bottom_right() -> None:
    q = torch.zeros(2, 1, 64, dtype=BF16)
    k = torch.zeros(5, 1, 64, dtype=BF16)
    v = torch.arange(1.0, 6.0).to(BF16)[:, None, None].expand(5, 1, 64).contiguous()
    found = fa3_fwd(q, k, v, [2], [5], emulator=Emulator())
    assert found.out[:, 0, 0].tolist() == [2.5, 3.0]


def test_att_03_rows_without_a_key_are_zero_and_no_neighbour_notices(draw: Draw) -> None:
    """More queries than keys: the first rows see nothing, within a tile and over whole tiles."""
    q, k, v = draw(300, 1, 64), draw(100, 1, 64), draw(100, 1, 64)
    found = fa3_fwd(q, k, v, [300], [100], emulator=Emulator())
    assert found.out[:200].count_nonzero() == 0
    assert found.lse[:, :200].isneginf().all()
    check(found, q, k, v, [300], [100])
    empty = fa3_fwd(q, k[:0], v[:0], [300], [0], emulator=Emulator())
    assert empty.out.count_nonzero() == 0 and empty.lse.isneginf().all()


@pytest.mark.parametrize("page", [64, 128, 256])
def test_att_04_what_lies_behind_the_end_of_a_page_is_never_seen(draw: Draw, page: int) -> None:
    q_lens, kv_lens, dim = [70, 3], [page + 5, 2 * page - 1], 128 if page == 64 else 64
    q, k, v = draw(73, 2, dim), draw(5, 1, page, dim), draw(5, 1, page, dim)
    table = torch.tensor([[3, 0, 99], [1, 4, 99]], dtype=torch.int32)
    outs = []
    for filler in (float("nan"), float("inf"), 0.0):
        for x in (k, v):
            x[0, :, 5:] = filler
            x[4, :, page - 1 :] = filler
            x[2] = filler
        found = fa3_fwd(q, k, v, q_lens, kv_lens, table=table, emulator=Emulator())
        outs.append(found.out)
    assert all(torch.equal(outs[0], other) for other in outs)
    check(found, q, k, v, q_lens, kv_lens, table=table)


def test_sequences_do_not_touch_each_other(draw: Draw) -> None:
    """NaN in one packed sequence stays there, on the way in and on the way out."""
    q, k, v = draw(140, 1, 64), draw(140, 1, 64), draw(140, 1, 64)
    for x in (q, k, v):
        x[70:] = float("nan")
    found = fa3_fwd(q, k, v, [70, 70], [70, 70], emulator=Emulator())
    alone = [x[:70].clone() for x in (q, k, v)]
    check(Attended(found.out[:70], found.lse[:, :70], found.path), *alone, [70], [70])
    assert found.out[70:].isnan().all()


def test_att_06_views_of_a_fused_buffer_and_transposed_heads(draw: Draw) -> None:
    fused = draw(150, 3, 2, 64)
    q, k, v = fused.unbind(1)
    before = fused.clone()
    found = fa3_fwd(q, k, v, [150], [150], emulator=Emulator())
    check(found, q, k, v, [150], [150])
    assert torch.equal(fused, before)
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(fa3_fwd(*by_head, [150], [150], emulator=Emulator()).out, found.out)
    with pytest.raises(UnsupportedInput, match="contiguous"):
        fa3_fwd(q, k, draw(150, 64, 2).mT, [150], [150], emulator=Emulator())
    with pytest.raises(UnsupportedInput, match="different strides"):
        fa3_fwd(q, k, by_head[2], [150], [150], emulator=Emulator())


def test_att_06_pages_may_hold_tokens_before_heads(draw: Draw) -> None:
    """[pages, tokens, heads, D], as other engines lay pages out, is a view away."""
    q, k, v = draw(70, 4, 64), draw(4, 128, 2, 64), draw(4, 128, 2, 64)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    check(fa3_fwd(q, k, v, [70], [300], table=table, emulator=Emulator()), q, k, v, [70], [300], table=table)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": torch.zeros(8, 2, 80, dtype=BF16)}, "belong together"),
        ({"q": torch.zeros(8, 2, 64)}, "dtype"),
        ({"q_lens": [9]}, "Lengths"),
        ({"kv_lens": [9]}, "add up"),
        ({"q": torch.zeros(8, 3, 64, dtype=BF16), "k": torch.zeros(8, 2, 64, dtype=BF16)}, "share"),
        ({"window": 4, "causal": False}, "window"),
        ({"softcap": -1.0}, "soft-cap"),
        ({"scale": 0.0}, "scale"),
        ({"emulator": None}, "Hopper"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(change: dict[str, Any], match: str) -> None:
    request: dict[str, Any] = {
        "q": torch.zeros(8, 2, 64, dtype=BF16), "k": torch.zeros(8, 1, 64, dtype=BF16),
        "q_lens": [8], "kv_lens": [8], "emulator": Emulator(), **change,
    }  # fmt: skip
    with pytest.raises(UnsupportedInput, match=match) as caught:
        fa3_fwd(request.pop("q"), request["k"], request.pop("k"), **request)
    assert caught.value.hint


def test_sizes_outside_the_table_are_refused() -> None:
    x = torch.zeros(8, 1, 80, dtype=BF16)
    with pytest.raises(UnsupportedInput, match="head size"):
        fa3_fwd(x, x, x, [8], [8], emulator=Emulator())
    q, pages = torch.zeros(8, 1, 64, dtype=BF16), torch.zeros(4, 1, 16, 64, dtype=BF16)
    table = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(UnsupportedInput, match="Pages of 16"):
        fa3_fwd(q, pages, pages, [8], [20], table=table, emulator=Emulator())
    with pytest.raises(UnsupportedInput, match="do not fit"):
        fa3_fwd(q, pages, pages, [8], [65], table=table, emulator=Emulator())


def test_every_query_is_worked_on_once_longest_first() -> None:
    work = work_list([300, 1, 0, 50], [300, 200, 9, 20], causal=True, window=100, bm=128, bn=128)
    assert sorted(work[:, 0].tolist()) == [0, 128, 256, 300, 301]
    assert int(work[:, 1].sum()) == 351
    tiles = (work[:, 6] - work[:, 5]).tolist()
    assert tiles == sorted(tiles, reverse=True) and min(tiles) >= 1


def test_cost_counts_visible_pairs() -> None:
    assert visible_pairs([2, 3], [5, 2], causal=True) == 4 + 5 + 0 + 1 + 2
    assert visible_pairs([4], [4], causal=True, window=2) == 1 + 2 + 2 + 2
    found = cost([4], [4], heads=2, kv_heads=1, dim=64, causal=False)
    assert found.flops == 4 * 64 * 2 * 16
    assert found.bytes == 2 * 64 * (8 + 8) + (128 + 4) * 8


def test_controls_and_bounds_are_declared() -> None:
    assert [b.name for b in BUILDS if b.fails] == ["hd128 without the early wait", "hd128 KV tile 256"]
    assert all("overlap" in b.sass for b in KERNEL.builds)


# -- mutants ---------------------------------------------------------------------------------

PRODUCER, CONSUMER = fa3_schedule.produce, fa3_kernel.consume
PARTS = fa3_parts
WAIT_K = "mbarrier.wait(k_empty.index(slot), phase ^ 1)"
WAIT_V = "mbarrier.wait(v_full.index(v_slot), (n - 1) // ST & 1)"
V_BYTES = "mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes"
FREE_V = "o, p = warpgroup_mma_wait(0, deps=[o, p_new])"
ARRIVE_V = "mbarrier.arrive(v_empty.index(v_slot), count=1)"
ARRIVE_Q = "mbarrier.arrive(q_empty.index(c), count=1)"
NEXT = "\n" + " " * 16
CLEAN = "gl.where((rows < valid)[:, None], part.load(layout), 0.0)"
#: name: (function, edits, schedules of nine that must notice)
MUTANTS: dict[str, tuple[Any, list[tuple[str, str]], int]] = {
    "inverted producer phase": (PRODUCER, [(WAIT_K, WAIT_K.replace("phase ^ 1", "phase"))], 9),
    "wrong ping-pong parity": (CONSUMER, [("n + 1 + c & 1", "n & 1")], 9),
    "one product too many in flight": (CONSUMER, [("mma_wait(1, deps=[s])", "mma_wait(2, deps=[s])")], 9),
    "half the bytes": (PRODUCER, [(V_BYTES, V_BYTES + " // 2")], 9),
    "squared rescale": (CONSUMER, [("convert_layout(alpha,", "convert_layout(alpha * alpha,")], 9),
    "V freed before its product retires": (
        CONSUMER,
        [(FREE_V + NEXT + ARRIVE_V, ARRIVE_V + NEXT + FREE_V)],
        3,
    ),
    "no wait for a free K slot": (PRODUCER, [(WAIT_K, "")], 9),
    "no wait for V": (CONSUMER, [(WAIT_V, "")], 5),
    "Q refilled while the result leaves": (
        CONSUMER,
        [(ARRIVE_Q, ""), ("o, lse = finish", ARRIVE_Q + "; o, lse = finish")],
        7,
    ),
    "result not fenced": (PARTS.write_out, [("fence_async_shared()", "")], 9),
    "result not awaited": (PARTS.write_out, [("tma.store_wait(0)", "")], 9),
    "dirty V tail": (PARTS.clean_tail, [(CLEAN, "part.load(layout)")], 9),
}


def outcome(draw: Draw, emulator: Emulator) -> str:
    """Four KV tiles through two slots, two heads, a ragged end: every barrier is used more than once."""
    q, k, v = draw(256, 2, 128), draw(600, 1, 128), draw(600, 1, 128)
    k[500:] = v[500:] = float("nan")
    k, v = (torch.nn.functional.pad(x.transpose(0, 1)[None], (0, 0, 0, 40)) for x in (k, v))
    table = torch.zeros(1, 1, dtype=torch.int32)
    try:
        found = fa3_fwd(q, k, v, [256], [500], table=table, emulator=emulator)
    except (EmulatorError, AttributeError) as problem:
        return type(problem).__name__
    exact, _ = reference(q, k, v, checked(q, k, v, [256], [500], table=table))
    return "ok" if error(found.out, exact) < 4e-3 else "wrong numbers"


def test_the_mutants_problem_is_solved_without_a_mutation(draw: Draw) -> None:
    assert {outcome(draw, Emulator(s, blocks=1)) for s in SCHEDULES} == {"ok"}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(draw: Draw, mutant: Callable[..., Any], name: str) -> None:
    function, edits, least = MUTANTS[name]
    swaps = {function.fn.__name__: mutant(function, *edits)}
    found = [outcome(draw, Emulator(s, swaps=swaps, blocks=1)) for s in SCHEDULES]
    assert sum(result != "ok" for result in found) >= least, found
    assert "AttributeError" not in found


def test_a_deadlock_names_the_barrier_each_partition_waits_for(
    draw: Draw, mutant: Callable[..., Any]
) -> None:
    stuck = mutant(PRODUCER, ("k_empty.index(slot), phase ^ 1", "k_empty.index(slot), phase"))
    with pytest.raises(Deadlock) as caught:
        run(draw, [64], [64], 1, 1, 64, emulator=Emulator(swaps={"produce": stuck}))
    waiting = caught.value.waiting
    assert waiting["partition 2 (produce)"] == "k_empty[0] to complete the phase of parity 0"
    assert "q_full[1]" in waiting["partition 1 (consume)"]


def test_a_missing_fence_is_a_race(draw: Draw, mutant: Callable[..., Any]) -> None:
    bare = mutant(fa3_parts.write_out, ("fence_async_shared()", ""))
    with pytest.raises(Race, match="q_smem"):
        run(draw, [64], [64], 1, 1, 64, emulator=Emulator(swaps={"write_out": bare}))


@pytest.mark.cuda
@pytest.mark.hopper
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 300}, {"softcap": 30.0}], ids=str)
def test_numbers_on_a_gpu(draw: Draw, dim: int, options: dict[str, Any]) -> None:
    q_lens, kv_lens = [700, 1, 129, 64], [1500, 300, 129, 64]
    q = draw(sum(q_lens), 8, dim).cuda()
    k, v = (draw(sum(kv_lens), 2, dim).cuda() for _ in range(2))
    found = fa3_fwd(q, k, v, q_lens, kv_lens, **options)
    assert found.path == "gluon"
    check(found, q, k, v, q_lens, kv_lens, **options)


@pytest.mark.cuda
@pytest.mark.hopper
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("page", [64, 128])
def test_pages_on_a_gpu(draw: Draw, page: int) -> None:
    q_lens, kv_lens = [100, 1], [5 * page - 3, 2 * page + 1]
    q = draw(101, 8, 128).cuda()
    k, v = (draw(9, 2, page, 128).cuda() for _ in range(2))
    table = torch.tensor([[3, 0, 7, 8, 1], [5, 2, 4, 0, 0]], dtype=torch.int32, device="cuda")
    for x in (k, v):
        x[1, :, page - 3 :] = x[4, :, 1:] = x[6] = float("nan")
    found = fa3_fwd(q, k, v, q_lens, kv_lens, table=table)
    check(found, q, k, v, q_lens, kv_lens, table=table)


def test_a_work_list_is_made_once_for_all_layers_of_a_step() -> None:
    device = torch.device("cpu")
    first = planned(device, (130, 2), (130, 50), True, 0, 128, 64)
    assert planned(device, (130, 2), (130, 50), True, 0, 128, 64) is first
    assert planned(device, (130, 2), (130, 51), True, 0, 128, 64) is not first
    assert not first.idle_rows and planned(device, (130,), (1,), True, 0, 128, 64).idle_rows
