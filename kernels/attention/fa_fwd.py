"""Attention forward in plain Triton: the twin of ``fa3_fwd`` for every other GPU, and for the interpreter.

    out = softmax(mask(cap(Q K^T scale))) V,  LSE = log sum exp, per sequence and head, online over KV tiles
    (FlashAttention-2, arXiv 2307.08691, algorithm 1).

Same contract as ``fa3_fwd``: packed queries ``[Tq, Hq, D]``; K, V packed ``[Tk, Hkv, D]`` or in pages
``[N, Hkv, P, D]``, here of any size; bottom-right mask, window, soft-cap, GQA, LSE. Any head size up to 256
and any strides; bf16, fp16, fp32. One program per work item and head; KV tiles from the last to the first.
FLOPs: 4 D per visible (query, key) pair and head; bytes: Q, K, V and out once. Slots behind the end of a
sequence are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.attention.problem import Attended, checked, reference
from workbench.kernels.attention.work import cost, planned
from workbench.kernels.checks import require, require_runnable
from workbench.kernels.spec import Bound, Build, Kernel

__all__ = ["BUILDS", "KERNEL", "fa_fwd", "reference"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1.0e30)
#: Query tile, KV tile, warps, stages by padded head size: at most 96 KiB of shared memory, for sm_80 on.
TILES = {
    16: (128, 64, 4, 2),
    32: (128, 64, 4, 2),
    64: (128, 64, 4, 2),
    128: (128, 64, 8, 2),
    256: (64, 32, 4, 2),
}


@triton.jit
def _tile(
    base, keys, inside, kv, PAGE: tl.constexpr, D: tl.constexpr, HD: tl.constexpr, MASKED: tl.constexpr
):
    """Rows ``keys`` of K or V [BN, HD] of one head, packed or through the page table; masked ones are 0."""
    pointer, table_ptr, row, page_row = kv
    if PAGE == 0:
        at = (base + keys).to(tl.int64) * row
    else:
        page = tl.load(table_ptr + base + keys // PAGE, mask=inside, other=0).to(tl.int64)
        at = page * page_row + (keys % PAGE) * row
    dims = tl.arange(0, HD)
    at = pointer + at[:, None] + dims[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
    elif D < HD:
        return tl.load(at, mask=(dims < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _steps(
    state, q, first, stop, pos, base, keys_of, values_of, kv_len, numbers,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, HD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """KV tiles ``first`` down to ``stop``, both included; state fp32: acc [BM, HD], m and total [BM]."""
    acc, m, total = state
    scale, cap, window = numbers
    for step in range(0, first + 1 - stop):
        keys = (first - step) * BN + tl.arange(0, BN)
        inside = keys < kv_len
        if MASKED and WINDOW:  # keys before the first row's window are not read: anything may lie there
            inside = inside & (keys > tl.min(pos, 0) - window)
        k = _tile(base, keys, inside, keys_of, PAGE, D, HD, MASKED)
        v = _tile(base, keys, inside, values_of, PAGE, D, HD, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale
        if SOFTCAP:
            s = cap - 2.0 * cap / (tl.exp2(s * scale) + 1.0)
            factor = LOG2_E
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= pos[:, None])
            if WINDOW:
                seen = seen & (keys[None, :] > (pos - window)[:, None])
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2((m - m_new) * factor)
        p = tl.exp2(s * factor - (m_new * factor)[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit(do_not_specialize=("n_items", "group", "lse_row", "window"))
def fa_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, work_ptr, table_ptr, n_items, group, q_row, q_head, k_row, k_head,
    k_page, v_row, v_head, v_page, o_row, lse_row, scale, cap, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One work item of one head."""
    head = tl.program_id(0) // n_items
    item = work_ptr + tl.program_id(0) % n_items * 8
    row, rows, pos = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    base, kv_len, lo, hi = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    kv_head = (head // group).to(tl.int64)
    keys_of = (k_ptr + kv_head * k_head, table_ptr, k_row, k_page)
    values_of = (v_ptr + kv_head * v_head, table_ptr, v_row, v_page)
    numbers = (scale, cap, window)
    i = tl.arange(0, BM)
    d = tl.arange(0, HD)
    valid = (i < rows)[:, None] & (d < D)[None, :]
    q_at = q_ptr + (row + i).to(tl.int64)[:, None] * q_row + head.to(tl.int64) * q_head + d[None, :]
    q = tl.load(q_at, mask=valid, other=0.0)
    # Tiles from `right` on cross the diagonal or the end, tiles before `left` the window's edge.
    right = kv_len // BN
    left = lo
    if CAUSAL:
        right = tl.minimum(right, (pos + 1) // BN)
    if WINDOW:
        left = tl.maximum((pos + BM - window + BN - 1) // BN, lo)
    right = tl.minimum(tl.maximum(right, lo), hi)
    left = tl.minimum(left, right)
    state = (tl.zeros([BM, HD], tl.float32), tl.full([BM], FLOOR, tl.float32), tl.zeros([BM], tl.float32))
    state = _steps(state, q, hi - 1, right, pos + i, base, keys_of, values_of, kv_len, numbers,
                   True, CAUSAL, WINDOW, SOFTCAP, PAGE, D, HD, BN)  # fmt: skip
    state = _steps(state, q, right - 1, left, pos + i, base, keys_of, values_of, kv_len, numbers,
                   False, CAUSAL, WINDOW, SOFTCAP, PAGE, D, HD, BN)  # fmt: skip
    if WINDOW:
        state = _steps(state, q, left - 1, lo, pos + i, base, keys_of, values_of, kv_len, numbers,
                       True, CAUSAL, WINDOW, SOFTCAP, PAGE, D, HD, BN)  # fmt: skip
    acc, m, total = state
    factor = scale
    if SOFTCAP:
        factor = LOG2_E
    seen = total != 0.0  # NaN counts as seen: it must reach the result
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (m * factor + tl.log2(total)) * LN_2, float("-inf"))
    out = tl.where(seen[:, None], acc / total[:, None], 0.0)
    o_at = o_ptr + (row + i).to(tl.int64)[:, None] * o_row + head * D + d[None, :]
    tl.store(o_at, out.to(o_ptr.dtype.element_ty), mask=valid)
    tl.store(lse_ptr + head.to(tl.int64) * lse_row + row + i, lse, mask=i < rows)


def fa_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    table: Tensor | None = None,
) -> Attended:
    """Attention of packed queries; ``problem.Problem`` explains the mask; ``path`` is triton or interpreter.

    Raises ``UnsupportedInput`` for other dtypes, head sizes above 256, a last axis that is not contiguous,
    and where there is neither a GPU nor the interpreter; ``CompilerError`` for an untested triton.
    """
    problem = checked(
        q, k, v, q_lens, kv_lens, causal=causal, window=window, softcap=softcap, scale=scale, table=table
    )
    dim = q.shape[2]
    require_runnable("fa_fwd", q)
    require(
        q.dtype in (torch.bfloat16, torch.float16, torch.float32) and 1 <= dim <= 256,
        f"fa_fwd takes bf16, fp16 or fp32 with head sizes up to 256, not {q.dtype} with {dim}.",
        "Convert the tensors.",
    )
    require(
        all(x.stride(-1) == 1 for x in (q, k, v)),
        "The last axis of q, k and v must be contiguous.",
        "Use .contiguous().",
    )
    hd = max(16, triton.next_power_of_2(dim))
    bm, bn, warps, stages = TILES[hd]
    if q.dtype == torch.float32:
        bm, bn = min(bm, 64), 32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    width = 0 if table is None else table.shape[1]
    work = planned(q.device, problem.q_lens, problem.kv_lens, causal, window, bm, bn, width)
    if work.idle_rows:
        out.zero_()
        lse.fill_(float("-inf"))
    token = 0 if table is None else 2
    if len(work):
        arguments: dict[str, Any] = {
            "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": out, "lse_ptr": lse, "work_ptr": work.items,
            "table_ptr": work.items if table is None else table,
            "n_items": len(work), "group": q.shape[1] // k.shape[1],
            "q_row": q.stride(0), "q_head": q.stride(1),
            "k_row": k.stride(token), "k_head": k.stride(1), "k_page": k.stride(0),
            "v_row": v.stride(token), "v_head": v.stride(1), "v_page": v.stride(0),
            "o_row": q.shape[1] * dim, "lse_row": q.shape[0],
            "scale": problem.scale * LOG2_E.value * (2.0 / softcap if softcap else 1.0),
            "cap": float(softcap), "window": window,
            "CAUSAL": causal, "WINDOW": window > 0, "SOFTCAP": softcap > 0,
            "PAGE": 0 if table is None else k.shape[2], "D": dim, "HD": hd, "BM": bm, "BN": bn,
        }  # fmt: skip
        fa_fwd_kernel[(len(work) * q.shape[1],)](**arguments, num_warps=warps, num_stages=stages)
    return Attended(out, lse, "triton" if q.is_cuda else "interpreter")


def build(name: str, dim: int, *, page: int = 0, dtype: str = "bf16", **changed: Any) -> Build:
    """One configuration with the tiles of the table."""
    bm, bn, warps, stages = TILES[dim]
    pointers = {f"{n}_ptr": f"*{dtype}" for n in "qkvo"}
    pointers |= {"lse_ptr": "*fp32", "work_ptr": "*i32", "table_ptr": "*i32"}
    sizes = ("n_items", "group", "lse_row", "window")
    strides = [f"{x}_{part}" for x in "kv" for part in ("row", "head", "page")] + ["q_row", "q_head", "o_row"]
    bounds = changed.pop("sass", {})
    types = {**pointers, **dict.fromkeys([*sizes, *strides], "i32"), "scale": "fp32", "cap": "fp32"}
    constants = {
        "CAUSAL": True, "WINDOW": False, "SOFTCAP": False,
        "PAGE": page, "D": dim, "HD": dim, "BM": bm, "BN": bn, **changed,
    }  # fmt: skip
    return Build(
        name=name,
        signature=types,
        constants=constants,
        num_warps=warps,
        num_stages=stages,
        aligned=(*pointers, *strides),
        sass={"HGMMA": Bound(4), "spills": Bound(0, 0), "stack": Bound(0, 0), **bounds},
    )


BUILDS = (
    build("hd64 causal", 64),
    build("hd128", 128, CAUSAL=False),
    build("hd128 causal", 128),
    build("hd128 causal, pages of 16", 128, page=16),
    build("hd128 window soft-cap", 128, WINDOW=True, SOFTCAP=True),
    build("hd256 causal", 256),
)

KERNEL = Kernel(
    name="fa_fwd",
    title="FlashAttention-2 forward in plain Triton, packed or paged",
    language="triton",
    source="Dao, FlashAttention-2, arXiv 2307.08691, algorithm 1",
    function=fa_fwd_kernel,
    builds=BUILDS,
    cost=cost,
)
