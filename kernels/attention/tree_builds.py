"""Configurations of tree attention, what their machine code must show, and what it costs."""

from __future__ import annotations

from workbench.kernels.attention.paged_builds import ALIGNED
from workbench.kernels.attention.paged_launch import SHORT, TILE
from workbench.kernels.attention.tree_kernel import tree_attention_kernel
from workbench.kernels.spec import Bound, Build, Cost, Kernel

_NONE = Bound(0, 0)
_SIGNATURE = {
    **dict.fromkeys(("out", "lse"), "*fp32"),
    **dict.fromkeys(("table", "blocks", "starts", "keys", "depth", "words"), "*i32"),
    **dict.fromkeys(("scale", "cap"), "fp32"),
    **dict.fromkeys(("window", "chunk", "stride_q", "stride_table", "KVH"), "i32"),
}


def _build(
    name: str,
    format: str = "plain",
    page: int = 64,
    dim: int = 128,
    rows: int = 64,
    tma: bool = True,
    extras: bool = False,
    **sass: Bound,
) -> Build:
    k = {"plain": "bf16", "fp8": "fp8e4nv", "int8": "i8"}[format]
    v, width = ("i32", dim // 4) if format == "int8" else (k, dim)
    signature = {**_SIGNATURE, "q": "*bf16", "k": f"*{k}", "v": f"*{v}"}
    constants: dict[str, object] = {
        "G": 4, "BM": rows, "BN": TILE, "BT": SHORT, "D": dim, "HD": dim, "P": page, "W": 2,
        "FMT": format, "TMA": tma, "WINDOW": extras, "CAP": extras,
    }  # fmt: skip
    if tma:
        block = f"{dim},{TILE}" if format == "fp8" else f"{TILE},{width}"
        signature |= {"k_tma": f"tensordesc<{k}[{TILE},{dim}]>", "v_tma": f"tensordesc<{v}[{block}]>"}
    else:
        constants |= {"k_tma": None, "v_tma": None}
    if format == "plain":
        constants |= {"ks": None, "vs": None}
    else:
        signature |= {"ks": "*fp16", "vs": "*fp16"}
    facts = {"spills": _NONE, "stack": _NONE, "LDS.U8": _NONE, "I2F": _NONE}
    facts["UTMALDG"] = Bound(4, 4) if tma else _NONE
    facts |= {"HGMMA": Bound(12), "warnings": _NONE} if rows == 64 else {"HMMA": Bound(32), "HGMMA": _NONE}
    aligned = tuple(a for a in ALIGNED if a in signature)
    return Build(name, signature, constants, aligned=aligned, sass={**facts, **sass})


# 64 rows fill a warpgroup's tile (HGMMA, none of them serialized); up to 16 go to mma.sync like a decode. The
# registers are those of 3.6.0 and 3.7.1, whichever is larger, with slack; 255 is the limit without spills.
BUILDS = (
    _build("64 rows bf16 hd128 page 64", regs=Bound(0, 180)),
    _build("64 rows bf16 hd128 page 16", page=16, tma=False, regs=Bound(0, 210)),
    _build("64 rows bf16 hd128 page 64, window, cap", extras=True),
    _build("64 rows bf16 hd64 page 16", dim=64, page=16, tma=False, regs=Bound(0, 144)),
    _build("64 rows bf16 hd256 page 64", dim=256),
    _build("64 rows fp8 hd128 page 64", "fp8", regs=Bound(0, 236)),
    _build("64 rows int8 hd128 page 64", "int8", regs=Bound(0, 236)),
    _build("16 rows bf16 hd128 page 64", rows=16, regs=Bound(0, 104)),
)


def cost(
    batch: int,
    context: int,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    bits: float = 16.0,
    itemsize: int = 2,
) -> Cost:
    """Of one layer: ``rows`` tree rows per sequence on ``context`` cached tokens.

    Every row is counted against all rows of its tree: a dense block, whatever the mask hides in it.
    """
    keys = context + rows
    moved = batch * (keys * kv_heads * dim * 2 * bits / 8 + 2 * rows * heads * dim * itemsize)
    return Cost(4 * batch * rows * keys * heads * dim, int(moved))


KERNEL = Kernel(
    name="tree_attention",
    title="Draft-tree attention over pages: cached tokens and ancestors",
    language="triton",
    source="SpecInfer, arXiv 2305.09781, section 4.2",
    function=tree_attention_kernel,
    builds=BUILDS,
    cost=cost,
)
