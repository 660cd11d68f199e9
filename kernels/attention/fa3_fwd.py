"""FlashAttention-3 forward for Hopper, bf16 / fp16 (arXiv 2407.08608, algorithms 1 and 2): launch and facts.

    out = softmax(mask(cap(Q K^T scale))) V,  LSE = log sum exp, per sequence and head, online over KV tiles.

Layout: queries packed ``[Tq, Hq, D]``; K, V packed ``[Tk, Hkv, D]`` or in pages ``[N, Hkv, P, D]`` whose size
P is a multiple of the KV tile (64 or 128; smaller pages go to ``fa_fwd``). Head size 64, 128 or 256. Any
strides with a contiguous last axis and 16-byte aligned rows. FLOPs: 4 D per visible (query, key) pair and
query head; bytes: Q, K, V and out once. What lies behind the end of a sequence or page never reaches a
result, NaN included. The kernel itself is ``fa3_kernel``, its work list and producer ``fa3_schedule``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from workbench.kernels.attention.fa3_kernel import fa3_fwd_kernel
from workbench.kernels.attention.problem import Attended, Problem, checked, reference
from workbench.kernels.attention.tma_matrix import descriptor, matrix
from workbench.kernels.attention.work import cost, planned
from workbench.kernels.emulator import Emulator
from workbench.kernels.spec import Bound, Build, Kernel
from workbench.spec.errors import UnsupportedInput

__all__ = ["BUILDS", "KERNEL", "fa3_fwd", "reference"]

LOG2_E = 1.4426950408889634
#: KV tile and ring depth by head size: what fits 227 KiB beside Q without a spill.
TILES = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
#: The same for pages of 64.
SMALL_PAGE_TILES = {64: (64, 4), 128: (64, 4), 256: (64, 2)}


def fa3_fwd(
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
    emulator: Emulator | None = None,
    pingpong: bool = True,
    early_wait: bool = True,
) -> Attended:
    """Attention of packed queries; ``problem.Problem`` explains the mask; ``path`` is gluon or emulator.

    Raises ``UnsupportedInput`` for dtypes, head sizes, strides and pages outside the table above, and where
    there is neither a Hopper GPU nor an ``emulator``. ``pingpong`` and ``early_wait`` exist to measure what
    they bring.
    """
    problem = checked(
        q, k, v, q_lens, kv_lens, causal=causal, window=window, softcap=softcap, scale=scale, table=table
    )
    bn, stages = tiles_for(q, k, problem)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    width = 0 if table is None else table.shape[1]
    work = planned(q.device, problem.q_lens, problem.kv_lens, causal, window, 128, bn, width)
    if work.idle_rows:
        out.zero_()
        lse.fill_(float("-inf"))
    if not len(work):
        return Attended(out, lse, "nothing to do")
    of_q, of_k, of_v, of_o = matrix(q, "q"), matrix(k, "k"), matrix(v, "v"), matrix(out, "out")
    if of_k.starts != of_v.starts:
        raise UnsupportedInput("k and v have different strides.", hint="Use .contiguous() on both.")
    dim, bits = q.shape[2], 16
    arguments: dict[str, Any] = {
        "q_desc": descriptor(q, of_q, (64, dim), bits),
        "k_desc": descriptor(k, of_k, (bn, dim), bits),
        "v_desc": descriptor(v, of_v, (bn, dim), bits),
        "o_desc": descriptor(out, of_o, (64, dim), bits),
        "o_ptr": out,
        "lse_ptr": lse,
        "work_ptr": work.items,
        "pages_ptr": work.items if table is None else table,
        "n_items": len(work),
        "n_tiles": len(work) * q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "q_rows": of_q.head_rows,
        "q_cols": of_q.head_columns,
        "kv_rows": of_k.head_rows,
        "kv_cols": of_k.head_columns,
        "page_rows": of_k.page_rows,
        "o_row": q.shape[1] * dim,
        "lse_row": q.shape[0],
        "window": window,
        "scale": problem.scale * LOG2_E * (2.0 / softcap if softcap else 1.0),
        "cap": float(softcap),
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "PAGE": 0 if table is None else k.shape[2],
        "HD": dim,
        "BN": bn,
        "ST": stages,
        "PINGPONG": pingpong,
        "EARLY_WAIT": early_wait,
    }
    return Attended(out, lse, run(fa3_fwd_kernel, arguments, q.device, emulator))


def tiles_for(q: Tensor, k: Tensor, problem: Problem) -> tuple[int, int]:
    """KV tile and ring depth; raises ``UnsupportedInput`` for what the kernel does not take."""
    dim = q.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16) or dim not in TILES:
        raise UnsupportedInput(
            f"fa3_fwd takes bf16 or fp16 with head size {', '.join(map(str, TILES))}; not {q.dtype}, {dim}.",
            hint="fa_fwd takes every head size up to 256, and fp32.",
        )
    if problem.table is None:
        return TILES[dim]
    page = k.shape[2]
    for bn, stages in (TILES[dim], SMALL_PAGE_TILES[dim]):
        if page % bn == 0:
            return bn, stages
    raise UnsupportedInput(
        f"Pages of {page} tokens are no multiple of the KV tile (64 or 128).",
        hint="Use fa_fwd, or a page size of 64 or 128.",
    )


def run(kernel: Any, arguments: dict[str, Any], device: torch.device, emulator: Emulator | None) -> str:
    """Launch on the GPU or in the emulator; the path taken."""
    if emulator is not None:
        emulator.launch(kernel, min(emulator.blocks, arguments["n_tiles"]), arguments)
        return "emulator"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        raise UnsupportedInput(
            "This kernel needs a Hopper GPU (compute capability 9.0).",
            hint="Use fa_fwd, or run it on the CPU with emulator=Emulator().",
        )
    blocks = min(torch.cuda.get_device_properties(device).multi_processor_count, arguments["n_tiles"])
    kernel[(blocks,)](**arguments, num_warps=4)
    return "gluon"


def signature(dim: int, bn: int, dtype: str) -> dict[str, str]:
    """Types of the kernel's run-time arguments."""
    bits = 8 if dtype.startswith("fp8") else 16

    def box(rows: int) -> str:
        return f"tensordesc<{dtype}[{rows}, {dim}],{NVMMASharedLayout(min(128, dim * bits // 8), bits)!r}>"

    sizes = ("n_items", "n_tiles", "group", "page_rows", "o_row", "lse_row", "window")
    steps = ("q_rows", "q_cols", "kv_rows", "kv_cols")
    return {
        "q_desc": box(64),
        "k_desc": box(bn),
        "v_desc": box(bn),
        "o_desc": box(64),
        "o_ptr": f"*{dtype}",
        "lse_ptr": "*fp32",
        "work_ptr": "*i32",
        "pages_ptr": "*i32",
        **dict.fromkeys(sizes + steps, "i32"),
        "scale": "fp32",
        "cap": "fp32",
    }


ZERO = Bound(0, 0)
#: Asynchronous products, TMA both ways, register reallocation, no spill, no serialised product.
CLEAN = {
    "HMMA": ZERO,
    "LDL": ZERO,
    "STL": ZERO,
    "stack": ZERO,
    "warnings": ZERO,
    "UTMALDG": Bound(4),
    "UTMASTG": Bound(1),
    "USETMAXREG": Bound(4),
    "regs": Bound(168, 168),
    "smem": Bound(0, 232_448),
    # Barriers of a warpgroup: 5 per steady step around the mbarriers; cleaning a ragged V tail has most.
    "BAR": Bound(0, 90),
}


def build(name: str, dim: int, *, page: int = 0, dtype: str = "bf16", **changed: Any) -> Build:
    """One configuration; the exponentials of the steady loop (BN / 2 a thread, 2 to rescale) overlap."""
    bn, stages = (SMALL_PAGE_TILES if page == 64 else TILES)[dim]
    bn, stages = changed.pop("tiles", (bn, stages))
    bounds = changed.pop("sass", {})
    fails = changed.pop("fails", False)
    constants = {
        "CAUSAL": True, "WINDOW": False, "SOFTCAP": False, "PAGE": page, "HD": dim, "BN": bn, "ST": stages,
        "PINGPONG": True, "EARLY_WAIT": True, **changed,
    }  # fmt: skip
    return Build(
        name=name,
        signature=signature(dim, bn, dtype),
        constants=constants,
        aligned=("o_ptr", "lse_ptr", "work_ptr", "pages_ptr", "o_row"),
        sass={**CLEAN, "HGMMA": Bound(32), "overlap": Bound(bn // 2 - 4), **bounds},
        fails=fails,
    )


BUILDS = (
    build("hd128", 128, CAUSAL=False),
    build("hd128 causal", 128),
    build("hd128 causal fp16", 128, dtype="fp16"),
    build("hd64 causal", 64),
    build("hd256 causal", 256),
    build("hd128 causal, pages of 128", 128, page=128),
    build("hd128 causal, pages of 64", 128, page=64),
    build("hd128 window", 128, WINDOW=True),
    build("hd128 causal soft-cap", 128, SOFTCAP=True),
    build("hd128 without the early wait", 128, EARLY_WAIT=False, CAUSAL=False, fails=True),
    build("hd128 KV tile 256", 128, tiles=(256, 1), CAUSAL=False, fails=True),
)

KERNEL = Kernel(
    name="fa3_fwd",
    title="FlashAttention-3 forward: TMA producer, two ping-pong consumer warpgroups",
    language="gluon",
    source="Shah et al., FlashAttention-3, arXiv 2407.08608, algorithms 1 and 2",
    function=fa3_fwd_kernel,
    builds=BUILDS,
    cost=cost,
)
