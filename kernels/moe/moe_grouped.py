"""Experts on sorted tokens: SiLU(x Wg^T) * (x Wu^T) and its product with Wd, summed over a token's experts.

    h[slot]  = SiLU(gate) * up,  (gate, up) = x[slot / k] W_gate_up[e]^T     (``moe_gemm``, gathered rows)
    p[slot]  = weight[slot] * (h[slot] W_down[e]^T)                         (``moe_gemm``, weighted once)
    y[token] = p[token k] + p[token k + 1] + ...  in this order             (``moe_combine``)

One grouped GEMM per projection over the blocks of ``moe_align``: a block has one expert, its rows are fetched
by slot (TMA gathers need Blackwell, so rows come by cp.async), the expert's weights by TMA. Blocks behind the
true length return at once; experts without tokens have no block. A block of an expert that lives elsewhere
(-1) yields zeros. Sums are float32, rounded once per product; nothing is added atomically, so results repeat
bit for bit and do not depend on the block. vLLM ``fused_moe``; MegaBlocks (arXiv 2211.15841).

Layout: x [T, H], W_gate_up [E, 2 I, H] interleaved (``workbench.kernels.layouts.experts``), W_down [E, H, I].
FLOPs 6 T k H I. Bytes: the weights of the experts hit, and x, h, p, y.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.layouts.experts import split_gate_up
from workbench.kernels.linear.operands import FLOATS, check_dense, check_device, check_rows, check_shape
from workbench.kernels.moe.moe_align import Aligned, moe_align
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import UnsupportedInput


def reference(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The layer's output [T, H] in ``dtype``, token by token; ids outside 0..E-1 contribute nothing."""
    gate, up = (w.to(dtype) for w in split_gate_up(gate_up))
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for t, j in (ids >= 0).logical_and(ids < len(gate)).nonzero().tolist():
        e, row = int(ids[t, j]), x[t].to(dtype)
        hidden = F.silu(gate[e] @ row) * (up[e] @ row)
        out[t] += weights[t, j].to(dtype) * (down[e].to(dtype) @ hidden)
    return out


@triton.jit
def moe_gemm_kernel(a, w, out, slots, experts, total, weights, n_slots, blocks, N, K, a_stride, out_stride,
                    UP: tl.constexpr, TOP_K: tl.constexpr, BAND: tl.constexpr, PRECISION: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One block of slots times BN rows of its expert. UP: gather tokens, SiLU(gate) * up; else weigh rows."""
    tiles_n = tl.cdiv(N, BN)
    # Bands of BAND blocks, column by column: an expert's tile is read from memory once for all its blocks.
    pid = tl.program_id(0)
    band = pid // (BAND * tiles_n) * BAND
    rows = tl.minimum(blocks - band, BAND)
    block, n0 = band + pid % (BAND * tiles_n) % rows, pid % (BAND * tiles_n) // rows * BN
    if block * BM >= tl.load(total):
        return
    slot = tl.load(slots + block * BM + tl.arange(0, BM))
    real = slot < n_slots
    e = tl.load(experts + block)
    row = (slot // TOP_K if UP else slot).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    ks = tl.arange(0, BK)
    if e >= 0:
        where = a + row[:, None] * a_stride + ks[None, :]
        for k0 in range(0, K, BK):
            x = tl.load(where + k0, mask=real[:, None] & (k0 + ks < K)[None, :], other=0.0)
            # The last tile of an expert may reach into the next: columns behind N are not stored.
            tile = w.load([e * N + n0, k0]).T
            acc = tl.dot(x, tile, acc, input_precision=PRECISION)
    if UP:
        gate, up = tl.split(acc.reshape(BM, BN // 2, 2))
        acc = gate / (1.0 + tl.exp(-gate)) * up
        ns = n0 // 2 + tl.arange(0, BN // 2)
        inside = ns < N // 2
    else:
        acc *= tl.load(weights + slot, mask=real, other=0.0)[:, None]
        ns = n0 + tl.arange(0, BN)
        inside = ns < N
    to = out + slot.to(tl.int64)[:, None] * out_stride + ns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def moe_combine_kernel(parts, ids, y, E, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One token: the sum of its slots in their order; slots of no expert were never written, so not read."""
    t = tl.program_id(0).to(tl.int64)
    hs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        e = tl.load(ids + t * TOP_K + j)
        there = (hs < H) & (e >= 0) & (e < E)
        acc += tl.load(parts + (t * TOP_K + j) * H + hs, mask=there, other=0.0).to(tl.float32)
    tl.store(y + t * H + hs, acc.to(y.dtype.element_ty), mask=hs < H)


def _build(name: str, up: bool, bm: int, bn: int, warps: int, stages: int, regs: int) -> Build:
    signature = {"a": "*bf16", "w": f"tensordesc<bf16[{bn},64]>", "out": "*bf16", "weights": "*fp32"}
    signature |= {"slots": "*i32", "experts": "*i32", "total": "*i32"}
    signature |= dict.fromkeys(("n_slots", "blocks", "N", "K", "a_stride", "out_stride"), "i32")
    constants = {"UP": up, "TOP_K": 8, "BAND": 8, "PRECISION": "tf32", "BM": bm, "BN": bn, "BK": 64}
    # Rows by cp.async (LDGSTS), weights by TMA; 16 rows are work for mma.sync, 64 and more for wgmma.
    product = (
        {"HMMA": Bound(8), "HGMMA": Bound(0, 0)} if bm == 16 else {"HGMMA": Bound(4, 4), "HMMA": Bound(0, 0)}
    )
    sass = {**product, "LDGSTS": Bound(1), "UTMALDG": Bound(3, 4), "LDL": Bound(0, 0), "STL": Bound(0, 0)}
    sass |= {"stack": Bound(0, 0), "regs": Bound(0, regs), "smem": Bound(0, 232_448), "warnings": Bound(0, 0)}
    return Build(name, signature, constants, warps, stages,
                 ("a", "out", "slots", "N", "K", "a_stride", "out_stride"), sass)  # fmt: skip


BUILDS = (
    _build("gate and up 64 x 128", True, 64, 128, 4, 4, 110),
    _build("down 64 x 128", False, 64, 128, 4, 4, 110),
    _build("gate and up 16 x 128", True, 16, 128, 4, 4, 96),
    _build("down 16 x 128", False, 16, 128, 4, 4, 96),
    _build("gate and up 128 x 256", True, 128, 256, 8, 3, 255),
)
COMBINE_BUILDS = (
    Build(
        "8 experts a token",
        {"parts": "*bf16", "ids": "*i32", "y": "*bf16", "E": "i32", "H": "i32"},
        {"TOP_K": 8, "BLOCK": 1024},
        4, 1, ("parts", "ids", "y", "H"),
        {"LDL": Bound(0, 0), "STL": Bound(0, 0), "stack": Bound(0, 0), "regs": Bound(0, 96)},
    ),
)  # fmt: skip


def cost(T: int, k: int, E: int, H: int, I: int, hit: int = 0, **_: object) -> Cost:  # noqa: E741 (the papers' I)
    """Work of one layer in bf16: the weights of ``hit`` experts (0: min(E, T k)), x, h, p and y."""
    hit = hit or min(E, T * k)
    return Cost(6 * T * k * H * I, 6 * hit * H * I + 2 * T * (2 * H + k * (2 * I + 2 * H)))


KERNELS = (
    Kernel("moe_gemm", "Grouped product of one projection", "triton", "vLLM fused_moe; MegaBlocks",
           moe_gemm_kernel, BUILDS, cost),
    Kernel("moe_combine", "Sum over a token's experts, in order", "triton", "vLLM fused_moe",
           moe_combine_kernel, COMBINE_BUILDS,
           lambda T, k, H, **_: Cost(T * k * H, 2 * T * H * (k + 1))),
)  # fmt: skip


def _tile(slots: int, experts: int) -> tuple[int, int, int, int]:
    """(BM, BN, warps, stages) by slots per expert; not tuned on a device yet."""
    each = slots / experts
    return (16, 128, 4, 4) if each <= 16 else (64, 128, 4, 4) if each <= 256 else (128, 256, 8, 3)


def moe_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor,
    *, block: int = 0, expert_map: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The expert layer [T, H] of ``x`` [T, H] with router ``ids`` [T, k] and float32 ``weights`` [T, k].

    ``gate_up`` [E, 2 I, H] and ``down`` [E, H, I] in x's dtype (bf16, fp16; fp32 without TF32). ``block`` is
    16, 64 or 128 (0: by slots per expert). ``expert_map`` int32 [experts of the router] names local experts,
    -1 for those of other ranks, whose share is left out. Runs on CUDA, or in the interpreter. Raises
    :class:`UnsupportedInput` for other dtypes, strides or sizes (H and I multiples of 8).
    """
    (tokens, hidden), (local, inner2, _), k = x.shape, gate_up.shape, ids.shape[-1]
    _check(x, gate_up, down, ids, weights, block, expert_map)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = tokens * k
    if n == 0 or hidden == 0:
        return y.zero_()
    experts = local if expert_map is None else expert_map.numel()
    tiles = {16: (16, 128, 4, 4), 64: (64, 128, 4, 4), 128: (128, 256, 8, 3)}
    bm, bn, warps, stages = tiles[block] if block else _tile(n, experts)
    aligned = moe_align(ids, experts, bm, expert_map)
    inner = x.new_empty(n, inner2 // 2)
    parts = x.new_empty(n, hidden)
    for up, a, w, out in ((True, x, gate_up, inner), (False, inner, down, parts)):
        _product(aligned, a, w, out, weights, up, k, bm, bn, warps, stages)
    moe_combine_kernel[(tokens, triton.cdiv(hidden, 1024))](
        parts, ids, y, experts, hidden, TOP_K=k, BLOCK=1024, num_warps=4
    )
    return y


def _product(aligned: Aligned, a: Tensor, w: Tensor, out: Tensor, weights: Tensor, up: bool, k: int,
             bm: int, bn: int, warps: int, stages: int) -> None:  # fmt: skip
    blocks = aligned.experts.numel()
    bk, precision = (32, "ieee") if a.dtype == torch.float32 else (64, "tf32")  # tf32 concerns float32 only
    moe_gemm_kernel[(blocks * triton.cdiv(w.shape[1], bn),)](
        a, TensorDescriptor.from_tensor(w.flatten(0, 1), [bn, bk]), out,
        aligned.slots, aligned.experts, aligned.total, weights, out.shape[0], blocks, w.shape[1], w.shape[2],
        a.stride(0), out.stride(0), UP=up, TOP_K=k, BAND=8, PRECISION=precision, BM=bm, BN=bn, BK=bk,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _check(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, block: int,
           expert_map: Tensor | None) -> None:  # fmt: skip
    kinds = (*FLOATS, torch.float32)
    check_device("moe_grouped", x, gate_up, down, ids, weights, expert_map)
    check_rows("moe_grouped", "x", x, kinds)
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        check_rows("moe_grouped", name, tensor, (x.dtype,), rank=3)
        check_dense("moe_grouped", name, tensor, (x.dtype,))
    local, inner = gate_up.shape[0], gate_up.shape[1] // 2
    check_shape("moe_grouped", "gate_up", gate_up, (local, 2 * inner, x.shape[1]))
    check_shape("moe_grouped", "down", down, (local, x.shape[1], inner))
    check_dense("moe_grouped", "weights", weights, (torch.float32,))
    check_shape("moe_grouped", "weights", weights, tuple(ids.shape))
    if ids.ndim != 2 or len(ids) != len(x) or block not in (0, 16, 64, 128):
        raise UnsupportedInput(
            f"moe_grouped: ids {tuple(ids.shape)} for x {tuple(x.shape)}, blocks of {block}.",
            hint="ids are [tokens, k]; a block is 16, 64 or 128, or 0 to have it chosen.",
        )
