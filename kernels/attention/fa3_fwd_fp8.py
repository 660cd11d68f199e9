"""FlashAttention-3 forward in FP8 for Hopper: launch and facts (arXiv 2407.08608, section 3.3).

    out = softmax(mask(cap(q_scale k_scale Q8 K8^T scale))) (v_scale V8),  P cast to E4M3 as 2^8 P

Layout: ``Fp8Blocks``, as ``fp8_prepare`` writes it: one scale per 128 tokens and head, V transposed and
permuted, head size 64 or 128 (256 spills in every form tried). ``two_level`` adds each tile's product to O in
float32, because the FP8 tensor-core accumulator loses low bits over long sums (flash-attention PR 2250); it
is the default above 32k tokens. FLOPs: 4 D per visible pair and query head, at FP8 rate; bytes: Q, K, V one
byte per element, out two, each once.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout

from workbench.kernels.attention.fa3_fp8_kernel import fa3_fwd_fp8_kernel
from workbench.kernels.attention.fa3_fwd import CLEAN, LOG2_E, ZERO, run
from workbench.kernels.attention.fp8_blocks import BLOCK, Fp8Blocks, restored
from workbench.kernels.attention.problem import Attended, checked
from workbench.kernels.attention.problem import reference as attention
from workbench.kernels.attention.tma_matrix import descriptor, matrix
from workbench.kernels.attention.work import cost as attention_cost
from workbench.kernels.attention.work import planned
from workbench.kernels.emulator import Emulator
from workbench.kernels.spec import Bound, Build, Kernel
from workbench.spec.errors import UnsupportedInput

__all__ = ["BUILDS", "KERNEL", "fa3_fwd_fp8", "reference"]

LONG = 32_768
#: KV tile, ring depth and overlap by (head size, two-level): what fits the registers without a spill.
TILES = {
    (64, False): (128, 4, True),
    (64, True): (128, 4, True),
    (128, False): (128, 4, True),
    (128, True): (64, 4, True),
}
#: The other two-level form: KV tile 128, softmax hidden by the other warpgroup only.
WIDE_TWO_LEVEL = (128, 2, False)


def reference(x: Fp8Blocks, **mask: Any) -> tuple[Tensor, Tensor]:
    """Attention in float64 on the values that the codes stand for: out [Tq, Hq, D] and LSE [Hq, Tq]."""
    q, k, v = restored(x)
    return attention(q, k, v, checked(q, k, v, x.q_lens, x.kv_lens, **mask))


def fa3_fwd_fp8(
    x: Fp8Blocks,
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    two_level: bool | None = None,
    wide: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    emulator: Emulator | None = None,
) -> Attended:
    """FP8 attention; output in ``dtype``; ``path`` is gluon or emulator; the mask is that of ``fa3_fwd``.

    ``two_level`` None decides by length. ``wide`` takes the KV tile of 128 for two-level at head size 128.
    Raises ``UnsupportedInput`` for what does not fit, and without both a Hopper GPU and an ``emulator``.
    """
    x.check()
    rows, heads, dim = x.q.shape
    kv_heads, device = x.k.shape[1], x.q.device
    deep = max(x.kv_lens, default=0) > LONG if two_level is None else two_level
    if (dim, deep) not in TILES or dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedInput(
            f"fa3_fwd_fp8 takes head sizes 64 and 128 and writes bf16 or fp16, not {dim} and {dtype}.",
            hint="Use fa3_fwd for head size 256.",
        )
    scale = dim**-0.5 if scale is None else scale
    if window < 0 or (window and not causal) or not 0 <= softcap < math.inf or not 0 < scale < math.inf:
        raise UnsupportedInput(
            f"A window of {window} (causal: {causal}), a soft-cap of {softcap}, a scale of {scale}.",
            hint="A window needs causal=True; a scale is positive; a soft-cap too, or 0 for none.",
        )
    bn, stages, overlap = WIDE_TWO_LEVEL if wide and deep and dim == 128 else TILES[dim, deep]
    out = torch.empty((rows, heads, dim), dtype=dtype, device=device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=device)
    work = planned(device, x.q_lens, x.kv_lens, causal, window, BLOCK, bn, x.table.shape[1])
    if work.idle_rows:
        out.zero_()
        lse.fill_(float("-inf"))
    if not len(work):
        return Attended(out, lse, "nothing to do")
    pages = x.table.long()
    factor = scale * LOG2_E * (2.0 / softcap if softcap else 1.0)
    arguments: dict[str, Any] = {
        "q_desc": descriptor(x.q, matrix(x.q, "q"), (64, dim), 8),
        "k_desc": descriptor(x.k, matrix(x.k, "k"), (bn, dim), 8),
        "v_desc": descriptor(x.v, matrix(x.v, "v"), (dim, bn), 8),
        "o_desc": descriptor(out, matrix(out, "out"), (64, dim), 16),
        "o_ptr": out, "lse_ptr": lse, "work_ptr": work.items, "pages_ptr": x.table, "q_scale_ptr": x.q_scale,
        # In the order of the page table, so that the kernel need not look a page up to find its scale.
        "k_scale_ptr": x.k_scale[pages].contiguous(), "v_scale_ptr": x.v_scale[pages].contiguous(),
        "n_items": len(work), "n_tiles": len(work) * heads, "group": heads // kv_heads, "heads": heads,
        "kv_heads": kv_heads, "page_rows": kv_heads * BLOCK, "o_row": heads * dim, "lse_row": rows,
        "window": window, "scale": factor, "cap": float(softcap),
        "CAUSAL": causal, "WINDOW": window > 0, "SOFTCAP": softcap > 0, "PAGE": BLOCK, "HD": dim, "BN": bn,
        "ST": stages, "OVERLAP": overlap, "TWO_LEVEL": deep,
    }  # fmt: skip
    return Attended(out, lse, run(fa3_fwd_fp8_kernel, arguments, device, emulator))


#: As for ``fa3_fwd`` (q_lens, kv_lens, heads, kv_heads, dim, causal, window), with inputs of one byte.
cost = partial(attention_cost, itemsize=1)


def signature(dim: int, bn: int) -> dict[str, str]:
    """Types of the kernel's run-time arguments."""

    def box(dtype: str, rows: int, columns: int, bits: int) -> str:
        layout = NVMMASharedLayout(min(128, columns * bits // 8), bits)
        return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"

    pointers = ["lse_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr"]
    numbers = ["n_items", "n_tiles", "group", "heads", "kv_heads", "page_rows", "o_row", "lse_row", "window"]
    return {
        "q_desc": box("fp8e4nv", 64, dim, 8),
        "k_desc": box("fp8e4nv", bn, dim, 8),
        "v_desc": box("fp8e4nv", dim, bn, 8),
        "o_desc": box("bf16", 64, dim, 16),
        "o_ptr": "*bf16",
        **dict.fromkeys(pointers, "*fp32"),
        **dict.fromkeys(["work_ptr", "pages_ptr"], "*i32"),
        **dict.fromkeys(numbers, "i32"),
        **dict.fromkeys(["scale", "cap"], "fp32"),
    }


#: Byte permutes and shuffles stay where packing P (BN / 4 per consumer) and the row reductions put them: a
#: layout conversion of P would show at once (612 PRMT, 97 SHFL). Logic is masks and addresses, not bounded.
FP8_CLEAN = CLEAN | {"HGMMA": ZERO, "QGMMA": Bound(16), "PRMT": Bound(0, 100), "SHFL": Bound(0, 48)}


def build(
    name: str, dim: int, tiles: tuple[int, int, bool], *, two_level: bool = False, **changed: Any
) -> Build:
    """One configuration of KV tile, ring depth and overlap."""
    bn, stages, overlap = tiles
    fails = changed.pop("fails", False)
    types = signature(dim, bn)
    constants = {
        "CAUSAL": True, "WINDOW": False, "SOFTCAP": False, "PAGE": BLOCK, "HD": dim, "BN": bn, "ST": stages,
        "OVERLAP": overlap, "TWO_LEVEL": two_level, **changed,
    }  # fmt: skip
    return Build(
        name=name,
        signature=types,
        constants=constants,
        aligned=(*(n for n in types if n.endswith("_ptr")), "o_row"),
        sass={**FP8_CLEAN, **({"overlap": Bound(bn // 2 - 4)} if overlap else {})},
        fails=fails,
    )


BUILDS = (
    build("hd128", 128, TILES[128, False], CAUSAL=False),
    build("hd128 causal", 128, TILES[128, False]),
    build("hd64 causal", 64, TILES[64, False]),
    build("hd128 window", 128, TILES[128, False], WINDOW=True),
    build("hd128 causal soft-cap", 128, TILES[128, False], SOFTCAP=True),
    build("hd128 causal two-level", 128, TILES[128, True], two_level=True),
    build("hd64 causal two-level", 64, TILES[64, True], two_level=True),
    build("hd128 causal two-level, KV tile 128", 128, WIDE_TWO_LEVEL, two_level=True),
    build("hd128 two-level with overlap and KV tile 128", 128, (128, 2, True), two_level=True, fails=True),
)

KERNEL = Kernel(
    name="fa3_fwd_fp8",
    title="FlashAttention-3 forward in FP8, block scales, one- or two-level accumulation",
    language="gluon",
    source="Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3",
    function=fa3_fwd_fp8_kernel,
    builds=BUILDS,
    cost=cost,
)
