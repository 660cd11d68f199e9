"""kv_append: rotate new keys, quantize, and write keys and values where the paged kernels read them.

``k' = k cos + roll(k, D/2) sin`` (RoFormer, arXiv 2104.09864, half-split), rounded once to the dtype of k,
then encoded to the page layout: plain rows; FP8 rows of K and columns of V^T with a float16 scale per token
and head; INT8 rows with the same scales; NVFP4 blocks of 16. Encoding is a function of a token alone. KIVI
pages are written plain to the open pool, and `kivi_encode` turns full pages into codes, as the engine's
codec does. All bytes equal those of the torch codecs. Bytes moved: 2 H D itemsize read and the layout's
bytes written per token; work is negligible.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.kernels.attention.kv_append_kernels import (
    kivi_keys_kernel,
    kivi_values_kernel,
    kv_append_kernel,
)
from workbench.kernels.attention.paged_launch import PLAIN
from workbench.kernels.checks import (
    require,
    require_contiguous,
    require_device,
    require_dtype,
    require_runnable,
    require_shape,
)
from workbench.kernels.layouts import kv_fp4, kv_fp8, kv_int8, kv_plain
from workbench.kernels.layouts.pages import PageLayout
from workbench.kernels.spec import Bound, Build, Cost, Kernel

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_BYTE_ROWS = 8


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [T, H, D] rotated by fp32 ``cos``, ``sin`` [T, D] (first half of the sine negated), in its
    dtype."""
    wide = x.float()
    half = x.shape[-1] // 2
    return (wide.roll(half, -1) * sin[:, None] + wide * cos[:, None]).to(x.dtype)


def reference(
    k: Tensor,
    v: Tensor,
    planes: Mapping[str, Tensor],
    layout: PageLayout,
    slots: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    tensor_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """The same in plain torch: rotate, then the layout's own ``write``. Arguments as in :func:`kv_append`."""
    kept = slots >= 0
    if cos is not None and sin is not None:
        k = rotate(k, cos, sin)
    k, v, slots = k[kept], v[kept], slots[kept]
    if layout.format == "nvfp4":
        kv_fp4.write(planes, slots, k, v, "nvfp4", tensor_scales)
    else:
        kind = {"fp8": kv_fp8, "int8": kv_int8}.get(layout.format, kv_plain)
        kind.write(planes, slots, k, v)


def kv_append(
    k: Tensor,
    v: Tensor,
    planes: Mapping[str, Tensor],
    layout: PageLayout,
    slots: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    tensor_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write new tokens of one layer into its planes, in place.

    ``k``, ``v`` [T, KV heads, D] bf16, fp16 or fp32 (heads side by side; slices of a fused buffer are fine);
    ``slots`` int64 [T], ``page * P + offset``, negative: skip; ``cos``, ``sin`` float32 [T, D] or None to
    write ``k`` as it is; ``tensor_scales`` of K and V for NVFP4. Raises ``UnsupportedInput`` outside this
    table.
    """
    require_runnable("kv_append", k)
    formats = (*PLAIN, "fp8", "int8", "nvfp4")
    require(
        layout.format in formats,
        f"kv_append does not write {layout.format} pages.",
        f"It writes {', '.join(formats)}; full KIVI pages are encoded by kivi_encode().",
    )
    tokens = len(slots)
    require_dtype("k", k, _FLOATS)
    require_dtype("v", v, (k.dtype,))
    for name, x in (("k", k), ("v", v)):
        require_shape(name, x, (tokens, layout.heads, layout.dim))
        require(
            x.stride(2) == 1 and x.stride(1) == layout.dim,
            f"{name} is a view with strides {x.stride()}.",
            "Its heads must lie side by side: pass a contiguous tensor.",
        )
    power = layout.dim & (layout.dim - 1) == 0
    require(power and 32 <= layout.dim <= 256, f"Head size {layout.dim} is not supported.", "32 to 256, 2^n.")
    require_dtype("slots", slots, (torch.int64,))
    require_shape("slots", slots, (tokens,))
    require_contiguous("slots", slots)
    require((cos is None) == (sin is None), "cos and sin go together.", "Pass both, or neither.")
    for name, turn in (("cos", cos), ("sin", sin)):
        if turn is not None:
            require_dtype(name, turn, (torch.float32,))
            require_shape(name, turn, (tokens, layout.dim))
            require_contiguous(name, turn)
    layout.check(planes)
    require_device(k, v=v, slots=slots, cos=cos, sin=sin)
    require_device(k, **{f"plane {n}": x for n, x in planes.items()})
    if not tokens:
        return
    coded = layout.format not in PLAIN
    # Products and sums stay separate operations, as the codecs have them: their bytes are matched exactly.
    kv_append_kernel[(tokens, layout.heads)](
        planes["k"], planes["v"], planes.get("k_scale"), planes.get("v_scale"), k, v, cos, sin, slots,
        *tensor_scales, k.stride(0), v.stride(0), layout.heads, D=layout.dim, P=layout.page,
        FMT=layout.format if coded else "plain", ROPE=cos is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def kivi_encode(
    planes: Mapping[str, Tensor], layout: PageLayout, pages: Tensor, k: Tensor, v: Tensor, rows: Tensor
) -> None:
    """Encode full pages: page ``pages[i]`` from row ``rows[i]`` of the open pool ``k``, ``v`` [rows, H, P,
    D].

    ``pages``, ``rows`` int64 [n], on the device of the planes. Raises ``UnsupportedInput`` for other layouts.
    """
    require_runnable("kivi_encode", k)
    require(layout.format.startswith("kivi"), f"{layout.format} pages are no KIVI pages.", "Use kv_append().")
    bits, group = (int(n) for n in layout.format.removeprefix("kivi").split("_"))
    require_dtype("k", k, _FLOATS)
    require_dtype("v", v, (k.dtype,))
    sizes = (layout.heads, layout.page, layout.dim)
    for name, x in (("k", k), ("v", v)):
        require_shape(name, x, (len(x), *sizes))
        require_contiguous(name, x)
    for name, x in (("pages", pages), ("rows", rows)):
        require_dtype(name, x, (torch.int64,))
        require_shape(name, x, (len(pages),))
    power = all(n & (n - 1) == 0 for n in (layout.dim, layout.page, group))
    require(power, f"Sizes {sizes} with groups of {group} are not supported.", "Powers of two are.")
    layout.check(planes)
    require_device(k, v=v, pages=pages, rows=rows)
    require_device(k, **{f"plane {n}": x for n, x in planes.items()})
    if not len(pages):
        return
    common = {"D": layout.dim, "P": layout.page, "BITS": bits, "GROUP": group, "enable_fp_fusion": False}
    byte_rows = min(_BYTE_ROWS, layout.page * bits // 8)
    for name, source in (("k", k), ("v", v)):
        targets = (planes[name], planes[f"{name}_min"], planes[f"{name}_step"], source, rows, pages)
        if name == "k":
            kivi_keys_kernel[(len(pages), layout.heads, layout.page // group)](
                *targets, layout.heads, **common
            )
        else:
            blocks = layout.page * bits // 8 // byte_rows
            kivi_values_kernel[(len(pages), layout.heads, blocks)](
                *targets, layout.heads, BR=byte_rows, **common
            )


def _cost(tokens: int, kv_heads: int, dim: int, bits: float = 16.0, itemsize: int = 2) -> Cost:
    elements = 2 * tokens * kv_heads * dim
    return Cost(3 * elements, int(elements * (itemsize + bits / 8)) + tokens * (8 + 8 * dim))


def kivi_cost(pages: int, page: int, kv_heads: int, dim: int, bits: float = 5.0, itemsize: int = 2) -> Cost:
    """Of encoding K or V of full pages; ``bits`` per element with the parameters."""
    elements = pages * page * kv_heads * dim
    return Cost(4 * elements, int(elements * (itemsize + bits / 8)))


_QUIET = {"spills": Bound(0, 0), "stack": Bound(0, 0)}


def _append(name: str, format: str, plane: str, scale: str | None, registers: int) -> Build:
    signature = {
        "k_plane": plane,
        "v_plane": plane,
        "k": "*bf16",
        "v": "*bf16",
        "cos": "*fp32",
        "sin": "*fp32",
    }
    signature |= {"slots": "*i64", "k_factor": "fp32", "v_factor": "fp32"}
    signature |= dict.fromkeys(("stride_k", "stride_v", "KVH"), "i32")
    constants: dict[str, object] = {"D": 128, "P": 64, "FMT": format, "ROPE": True}
    if scale is None:
        constants |= {"k_scales": None, "v_scales": None}
    else:
        signature |= {"k_scales": scale, "v_scales": scale}
    aligned = tuple(a for a in signature if signature[a].startswith("*"))
    facts = {**_QUIET, "regs": Bound(0, registers)}
    return Build(name, signature, constants, num_warps=1, aligned=aligned, sass=facts)


def _kivi(name: str, bits: int, extra: dict[str, object], registers: int) -> Build:
    signature = {"codes": "*u8", "minimum": "*fp16", "step": "*fp16", "source": "*bf16"}
    signature |= {"rows": "*i64", "pages": "*i64", "KVH": "i32"}
    constants = {"D": 128, "P": 128, "BITS": bits, "GROUP": 32, **extra}
    facts = {**_QUIET, "regs": Bound(0, registers)}
    return Build(name, signature, constants, aligned=tuple(signature)[:6], sass=facts)


# A row per warp: a handful of registers, no spills; divisions are the exact ones and take a slow path (CALL).
BUILDS = (
    _append("bf16 hd128", "plain", "*bf16", None, 40),
    _append("fp8 hd128", "fp8", "*fp8e4nv", "*fp16", 40),
    _append("int8 hd128", "int8", "*i8", "*fp16", 40),
    _append("nvfp4 hd128", "nvfp4", "*u8", "*fp8e4nv", 40),
)
_TITLE = "KIVI encoding of full pages: "
KERNELS = (
    Kernel(
        "kv_append", "RoPE, quantization and page write of new keys and values", "triton",
        "vLLM reshape_and_cache; page layouts of this library", kv_append_kernel, BUILDS, _cost,
    ),
    Kernel(
        "kivi_keys", f"{_TITLE}keys per channel", "triton", "KIVI, arXiv 2402.02750", kivi_keys_kernel,
        (_kivi("4 bits hd128", 4, {}, 112), _kivi("2 bits hd128", 2, {}, 112)), kivi_cost,
    ),
    Kernel(
        "kivi_values", f"{_TITLE}values per token", "triton", "KIVI, arXiv 2402.02750", kivi_values_kernel,
        (_kivi("4 bits hd128", 4, {"BR": 8}, 64), _kivi("2 bits hd128", 2, {"BR": 8}, 104)), kivi_cost,
    ),
)  # fmt: skip
