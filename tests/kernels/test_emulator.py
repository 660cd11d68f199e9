"""The Gluon emulator on kernels small enough to know every answer: what it computes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workbench.kernels.attention.tma_matrix import descriptor, matrix
from workbench.kernels.emulator import SCHEDULES, Deadlock, Emulator, EmulatorError, Race
from workbench.kernels.emulator.memory import Barrier
from workbench.kernels.emulator.values import Int, Tile

F32 = torch.float32


@gluon.jit
def copy_kernel(x_desc, y_desc, rows, WAIT: gl.constexpr, FENCE: gl.constexpr, DRAIN: gl.constexpr):
    """Boxes of 16 rows from x to y, through shared memory and registers, doubled."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(x_desc.dtype, [16, 32], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    for i in range(gl.cdiv(rows, 16)):
        mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [i * 16, 0], ready.index(0), tile)
        if WAIT:
            mbarrier.wait(ready.index(0), i & 1)
        tile.store(tile.load(layout) * 2.0)
        if FENCE:
            fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [i * 16, 0], tile)
        if DRAIN:
            tma.store_wait(0)


def copied(schedule: Any = SCHEDULES[4], **switches: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(40, 32)
    y = torch.full((48, 32), float("nan"))
    arguments = {
        "x_desc": descriptor(x, matrix(x[:, None], "x"), (16, 32), 32),
        "y_desc": descriptor(y, matrix(y[:, None], "y"), (16, 32), 32),
        "rows": 40,
        "WAIT": True,
        "FENCE": True,
        "DRAIN": True,
    }
    Emulator(schedule).launch(copy_kernel, 1, arguments | switches)
    return x, y


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_copies_land_and_out_of_bounds_reads_zero(schedule: Any) -> None:
    x, y = copied(schedule)
    assert torch.equal(y[:40], 2 * x)
    assert y[40:].count_nonzero() == 0


def test_reading_before_a_copy_lands_reads_poison() -> None:
    _, y = copied(SCHEDULES[6], WAIT=False, rows=16)
    assert y[:16].isnan().all()


def test_an_unfenced_write_is_a_race() -> None:
    with pytest.raises(Race, match="without a fence"):
        copied(FENCE=False)


def test_a_store_nobody_waits_for_is_an_error() -> None:
    with pytest.raises(EmulatorError, match="1 stores not waited for"):
        copied(DRAIN=False, rows=16)


@gluon.jit
def wait_forever(bar):
    mbarrier.wait(bar.index(0), 0)


@gluon.jit
def arrive_twice(bar):
    mbarrier.arrive(bar.index(1), count=1)
    mbarrier.wait(bar.index(1), 0)


@gluon.jit
def stuck_kernel(n):
    gate = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(gate.index(0), count=1)
    mbarrier.init(gate.index(1), count=2)
    gl.warp_specialize([(wait_forever, (gate,)), (arrive_twice, (gate,))], [1], [24])


def test_a_deadlock_says_who_waits_for_what() -> None:
    for schedule in SCHEDULES:
        with pytest.raises(Deadlock) as caught:
            Emulator(schedule).launch(stuck_kernel, 1, {"n": 1})
        assert caught.value.waiting == {
            "partition 0 (wait_forever)": "gate[0] to complete the phase of parity 0",
            "partition 1 (arrive_twice)": "gate[1] to complete the phase of parity 0",
        }


@gluon.jit
def product_kernel(x_desc, out, LEFT: gl.constexpr):
    """x x^T of a 64 x 64 tile, waited for down to LEFT products."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile = gl.allocate_shared_memory(x_desc.dtype, [64, 64], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.expect(ready.index(0), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [0, 0], ready.index(0), tile)
    mbarrier.wait(ready.index(0), 0)
    acc = warpgroup_mma(tile, tile.permute((1, 0)), gl.zeros([64, 64], gl.float32, mma), is_async=True)
    acc = warpgroup_mma_wait(LEFT, deps=[acc])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    cols = gl.arange(0, 64, layout=gl.SliceLayout(0, mma))
    gl.store(out + rows[:, None] * 64 + cols[None, :], acc)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_product_counts_only_when_it_was_waited_for(schedule: Any) -> None:
    x = torch.randn(64, 64).bfloat16()
    arguments = {"x_desc": descriptor(x, matrix(x[:, None], "x"), (64, 64), 16)}
    out = torch.empty(64, 64)
    Emulator(schedule).launch(product_kernel, 1, arguments | {"out": out, "LEFT": 0})
    torch.testing.assert_close(out, x.float() @ x.float().T)
    with pytest.raises(EmulatorError, match="1 products"):
        Emulator(schedule).launch(product_kernel, 1, arguments | {"out": out, "LEFT": 1})
    assert out.isnan().all()


def test_barriers_count_arrivals_and_bytes() -> None:
    barrier = Barrier(2, "b")
    assert barrier.passed(1) and not barrier.passed(0)
    barrier.arrive(1, 64)
    barrier.arrive()
    assert not barrier.passed(0)
    barrier.landed(64)
    assert barrier.passed(0) and not barrier.passed(1)
    with pytest.raises(EmulatorError, match="more arrivals"):
        barrier.arrive(3)


def test_scalars_divide_as_c_does_and_do_not_wrap() -> None:
    assert (Int(-7) // 2, Int(-7) % 2, 7 // Int(-2), Int(7) % 4) == (-3, -1, -3, 3)
    assert isinstance(2 + Int(3) * 4, Int)
    with pytest.raises(EmulatorError, match="overflow"):
        Int(131072) * 16384
    assert Int(131072).to(gl.int64) * 16384 == 2147483648


def test_fp8_casts_saturate_and_maxima_ignore_nan() -> None:
    tile = Tile(torch.tensor([500.0, -1e9, 1.0625]))
    assert tile.to(gl.float8e4nv).data.float().tolist() == [448.0, -448.0, 1.0]


def test_what_is_not_emulated_says_so() -> None:
    @gluon.jit
    def kernel(n):
        gl.device_print("x", n)

    with pytest.raises(EmulatorError, match=r"gl\.device_print"):
        Emulator().launch(kernel, 1, {"n": 1})


def test_swapping_a_function_that_is_never_called_is_an_error() -> None:
    def other() -> None:
        return None

    with pytest.raises(EmulatorError, match="other_name"):
        Emulator(swaps={"other_name": other}).launch(stuck_or_not, 1, {"n": 1})


@gluon.jit
def stuck_or_not(n):
    gl.program_id(0)
