"""Tokens sorted by expert, each expert's list padded to whole blocks of the grouped GEMM.

Slot ``t * k + j`` is token t's j-th expert. Slots are listed expert by expert, in their own order within an
expert, and each list is filled up to a multiple of ``block`` with the sentinel ``T k``; ``experts[b]`` names
the expert of block b (-1 behind the last). Buffers have the static bound ``T k + min(E, T k) (block - 1)``
rounded up, the true length stays on the device: nothing waits for the host, and a CUDA graph can hold it. Ids
outside 0..E-1 belong to no expert and are left out. ``expert_map`` renames experts at the end (expert
parallelism: -1 where an expert lives elsewhere).

vLLM's ``moe_align_block_size``, one program per expert: it counts all slots, places its own. Nothing is added
atomically, so the order never changes. Operations ~ 2 E T k, bytes 4 T k (E + 1) at most, from L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.linear.operands import check_dense, check_device, check_shape
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import UnsupportedInput

CHUNK = 1024


@dataclass(frozen=True)
class Aligned:
    """``slots`` int32 [bound], ``experts`` int32 [bound / block], ``total`` int32 [1]: slots used, padded."""

    slots: Tensor
    experts: Tensor
    total: Tensor
    block: int


def bound(slots: int, experts: int, block: int) -> int:
    """The longest the padded list can get, in whole blocks."""
    return -(-(slots + min(experts, slots) * (block - 1)) // block) * block


def reference(ids: Tensor, experts: int, block: int, expert_map: Tensor | None = None) -> Aligned:
    """The same lists by a loop over experts, on the CPU."""
    flat, n = ids.flatten().cpu().long(), ids.numel()
    slots, owners = torch.full((bound(n, experts, block),), n), []
    for e in range(experts):
        mine = (flat == e).nonzero().flatten()
        start = len(owners) * block
        slots[start : start + len(mine)] = mine
        owners += [e if expert_map is None else int(expert_map[e])] * -(-len(mine) // block)
    names = torch.tensor(owners + [-1] * (len(slots) // block - len(owners)), dtype=torch.int32)
    return Aligned(slots.int(), names, torch.tensor([len(owners) * block], dtype=torch.int32), block)


@triton.jit
def _ids(ids, slots, n, E):
    """Expert ids of some slots; E for what is no slot or no expert."""
    e = tl.load(ids + slots, mask=slots < n, other=-1).to(tl.int32)
    return tl.where((e >= 0) & (e < E), e, E)


@triton.jit
def moe_align_kernel(ids, expert_map, slots, experts, total, n, length, E, MAPPED: tl.constexpr,
                     BLOCK: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Program e < E places expert e; program E fills what lies behind the last block."""
    e = tl.program_id(0)
    lanes, bins = tl.arange(0, CHUNK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for at in range(0, n, CHUNK):
        counts += tl.histogram(_ids(ids, at + lanes, n, E), BINS)
    padded = tl.where(bins < E, (counts + BLOCK - 1) // BLOCK * BLOCK, 0)
    start = tl.sum(tl.where(bins < e, padded, 0), 0)
    stop = start + tl.sum(tl.where(bins == e, padded, 0), 0)
    place, name = start, -1
    if e == E:
        tl.store(total, start)
        stop = length
    else:
        for at in range(0, n, CHUNK):
            mine = (_ids(ids, at + lanes, n, E) == e).to(tl.int32)
            tl.store(slots + place + tl.cumsum(mine, 0) - 1, at + lanes, mask=mine > 0)
            place += tl.sum(mine, 0)
        name = e
        if MAPPED:
            name = tl.load(expert_map + e)
    for at in range(place, stop, CHUNK):
        tl.store(slots + at + lanes, tl.zeros((CHUNK,), tl.int32) + n, mask=at + lanes < stop)
    for at in range(start // BLOCK, stop // BLOCK, CHUNK):
        tl.store(experts + at + lanes, tl.zeros((CHUNK,), tl.int32) + name, mask=at + lanes < stop // BLOCK)


def _build(name: str, experts: int, block: int) -> Build:
    signature = {"ids": "*i32", "expert_map": "*i32", "slots": "*i32", "experts": "*i32", "total": "*i32"}
    signature |= dict.fromkeys(("n", "length", "E"), "i32")
    bins = triton.next_power_of_2(experts + 1)
    # Histograms are atomics of shared memory (ATOMS); none may reach global memory, where they would race.
    sass = {"ATOMS": Bound(1), "ATOMG": Bound(0, 0), "REDG": Bound(0, 0), "LDL": Bound(0, 0)}
    sass |= {"STL": Bound(0, 0), "stack": Bound(0, 0), "regs": Bound(0, 96)}
    constants = {"MAPPED": True, "BLOCK": block, "BINS": bins, "CHUNK": CHUNK}
    return Build(name, signature, constants, 4, 1, ("ids", "slots", "experts"), sass)


BUILDS = (_build("64 experts, blocks of 64", 64, 64), _build("256 experts, blocks of 16", 256, 16))


def cost(T: int, k: int, E: int, block: int = 64, **_: object) -> Cost:
    """Work of one call; each expert's program reads all ids twice, from L2 after the first."""
    n, length = T * k, bound(T * k, E, block)
    return Cost(2 * E * n, 4 * (n + length + length // block + 1))


KERNEL = Kernel(
    "moe_align", "Tokens sorted by expert in padded blocks", "triton", "vLLM moe_align_block_size",
    moe_align_kernel, BUILDS, cost,
)  # fmt: skip


def moe_align(ids: Tensor, experts: int, block: int, expert_map: Tensor | None = None) -> Aligned:
    """Align ``ids`` [T, k] (int32 or int64, contiguous); ``expert_map`` int32 [experts].

    ``block`` is a power of two of at least 16 (the M of a tile). Runs on CUDA, or in the interpreter. Raises
    :class:`UnsupportedInput` for another dtype, layout or size, or 2^31 slots and more.
    """
    check_device("moe_align", ids, expert_map)
    check_dense("moe_align", "ids", ids, (torch.int32, torch.int64))
    if ids.ndim != 2 or experts < 1 or block < 16 or block & (block - 1) or ids.numel() >= 2**30:
        raise UnsupportedInput(
            f"moe_align: ids {tuple(ids.shape)}, {experts} experts, blocks of {block}.",
            hint="ids must be [tokens, k], experts at least 1, the block a power of two of at least 16.",
        )
    if expert_map is not None:
        check_dense("moe_align", "expert_map", expert_map, (torch.int32,))
        check_shape("moe_align", "expert_map", expert_map, (experts,))
    n = ids.numel()
    length = bound(n, experts, block)
    slots, owners, total = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (length, length // block, 1)
    )
    moe_align_kernel[(experts + 1,)](
        ids, ids if expert_map is None else expert_map, slots, owners, total, n, length, experts,
        MAPPED=expert_map is not None, BLOCK=block, BINS=triton.next_power_of_2(experts + 1), CHUNK=CHUNK,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return Aligned(slots, owners, total, block)
