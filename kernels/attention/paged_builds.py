"""Configurations of the paged decode kernels, what their machine code must show, and what they cost."""

from __future__ import annotations

from functools import partial

from workbench.kernels.attention.paged_fp4 import paged_fp4_kernel
from workbench.kernels.attention.paged_kivi import paged_kivi_kernel
from workbench.kernels.attention.paged_launch import FP4_TILE, SHORT, TILE
from workbench.kernels.attention.paged_rows import paged_rows_kernel
from workbench.kernels.spec import Bound, Build, Cost, Kernel

_NONE = Bound(0, 0)
_UNPACKED = {
    "spills": _NONE,
    "stack": _NONE,
    "HGMMA": _NONE,
    "HMMA": Bound(16),
    "I2F": _NONE,
    "LDS.U8": _NONE,
}
_COMMON = {
    "out": "*fp32",
    "lse": "*fp32",
    "table": "*i32",
    "lengths": "*i32",
    "scale": "fp32",
    "cap": "fp32",
    "window": "i32",
    "chunk": "i32",
    "stride_q": "i32",
    "stride_table": "i32",
    "KVH": "i32",
}
#: Arguments that are multiples of 16: addresses, and the strides that are handed over.
ALIGNED = ("out", "lse", "q", "k", "v", "ks", "vs", "stride_q", "chunk")
_STORED = {"plain": None, "fp8": "fp8e4nv", "int8": "i8"}


def _rows(
    name: str,
    format: str = "plain",
    page: int = 64,
    dim: int = 128,
    group: int = 4,
    tma: bool = True,
    extras: bool = False,
    dtype: str = "bf16",
    **sass: Bound,
) -> Build:
    k = _STORED[format] or dtype
    v = "i32" if format == "int8" else k
    width = dim // 4 if format == "int8" else dim
    signature = {**_COMMON, "q": f"*{dtype}", "k": f"*{k}", "v": f"*{v}"}
    constants: dict[str, object] = {
        "G": group, "BM": 16, "BN": TILE, "BT": SHORT, "D": dim, "HD": dim, "P": page,
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
    facts = {"spills": _NONE, "stack": _NONE, "HGMMA": _NONE, "HMMA": Bound(32), "LDS.U8": _NONE}
    facts["UTMALDG"] = Bound(4, 4) if tma else _NONE
    return _build(name, signature, constants, {**facts, **sass})


def _build(
    name: str, signature: dict[str, str], constants: dict[str, object], sass: dict[str, Bound]
) -> Build:
    aligned = tuple(a for a in ALIGNED if a in signature)
    return Build(name, signature, constants, num_warps=4, num_stages=2, aligned=aligned, sass=sass)


def _fp4(name: str, page: int, dim: int = 128, **sass: Bound) -> Build:
    signature = {
        **_COMMON, "q": "*bf16", "k": "*i32", "v": "*i32", "ks": "*fp8e4nv", "vs": "*fp8e4nv",
        "k_scale": "fp32", "v_scale": "fp32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "G": 4, "BM": 16, "BN": FP4_TILE, "BT": SHORT, "D": dim, "P": page, "WINDOW": False, "CAP": False,
    }  # fmt: skip
    return _build(name, signature, constants, {**_UNPACKED, **sass})


def _kivi(name: str, bits: int, page: int = 128, dim: int = 128, group: int = 32, **sass: Bound) -> Build:
    half = dict.fromkeys(("k_min", "k_step", "v_min", "v_step"), "*fp16")
    signature = {
        **_COMMON, **half, "q": "*bf16", "k": "*u8", "v": "*u8", "open_k": "*bf16", "open_v": "*bf16",
        "coded": "*i32", "open_row": "*i32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "G": 4, "BM": 16, "D": dim, "P": page, "BITS": bits, "GROUP": group, "WINDOW": False, "CAP": False,
    }  # fmt: skip
    return _build(name, signature, constants, {**_UNPACKED, **sass})


# Bounds as measured under triton 3.6.0 and 3.7.1, with slack of about a tenth in registers. Up to 16 query
# rows are work for mma.sync (HMMA), bound by bandwidth: 32 HMMA in a whole tile of 64 tokens at head size
# 128, the rest in the masked steps. Four UTMALDG: K and V, once ahead of the loop and once in it.
ROWS = (
    _rows("bf16 hd128 page 64", regs=Bound(0, 96)),
    _rows("bf16 hd128 page 16", page=16, tma=False, regs=Bound(0, 96), LDGSTS=Bound(16)),
    _rows("bf16 hd128 page 64, window, cap", extras=True, regs=Bound(0, 110)),
    _rows("bf16 hd128 page 64, 16 heads a KV head", group=16, regs=Bound(0, 96)),
    _rows("fp16 hd64 page 128", page=128, dim=64, dtype="fp16", HMMA=Bound(16), regs=Bound(0, 72)),
    _rows("bf16 hd256 page 64", dim=256, HMMA=Bound(64), regs=Bound(0, 170)),
    _rows("fp8 hd128 page 64", "fp8", regs=Bound(0, 110)),
    _rows("fp8 hd128 page 16", "fp8", page=16, tma=False, regs=Bound(0, 120)),
    _rows("int8 hd128 page 64", "int8", regs=Bound(0, 120), I2F=_NONE),
    _rows("int8 hd128 page 16", "int8", page=16, tma=False, regs=Bound(0, 140), I2F=_NONE),
)
# Codes are unpacked by bit operations: no integer-to-float conversions (I2F, a slow unit), and no byte-wide
# shared-memory loads, which is what reading FP4 as words is for.
FP4 = (
    _fp4("hd128 page 64", 64, regs=Bound(0, 112)),
    _fp4("hd128 page 16", 16, regs=Bound(0, 112)),
)
KIVI = (
    _kivi("4 bits hd128 page 128", 4, regs=Bound(0, 110)),
    _kivi("2 bits hd128 page 128", 2, regs=Bound(0, 110)),
)


def cost(
    batch: int, context: int, heads: int, kv_heads: int, dim: int, bits: float = 16.0, itemsize: int = 2
) -> Cost:
    """Of one step: ``bits`` per cached element, scales included; queries and outputs ``itemsize`` bytes."""
    cached = batch * context * kv_heads * dim * 2
    return Cost(
        4 * batch * context * heads * dim, int(cached * bits / 8) + 2 * batch * heads * dim * itemsize
    )


KERNELS = (
    Kernel(
        name="paged_decode",
        title="Split-KV decode over pages: 16-bit, FP8, INT8",
        language="triton",
        source="PagedAttention, arXiv 2309.06180; Flash-Decoding",
        function=paged_rows_kernel,
        builds=ROWS,
        cost=cost,
    ),
    Kernel(
        name="paged_decode_nvfp4",
        title="Split-KV decode over NVFP4 pages",
        language="triton",
        source="NVFP4 KV cache (TensorRT Model Optimizer); page layout of this library",
        function=paged_fp4_kernel,
        builds=FP4,
        cost=partial(cost, bits=4.5),
    ),
    Kernel(
        name="paged_decode_kivi",
        title="Split-KV decode over KIVI pages and an open 16-bit page",
        language="triton",
        source="KIVI, arXiv 2402.02750",
        function=paged_kivi_kernel,
        builds=KIVI,
        cost=partial(cost, bits=5.0),
    ),
)
