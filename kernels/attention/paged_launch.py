"""Starting the paged decode kernel of a format: what it is handed, and which way it reads pages.

Fixed tiles per format, no tuning at import: 64 tokens where a tile is a block of a page, 32 where codes are
unpacked in registers, a key group for KIVI. The copy engine is used when pages hold whole tiles, rows have a
power-of-two size and row numbers fit its 32-bit coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.attention.paged_fp4 import paged_fp4_kernel
from workbench.kernels.attention.paged_kivi import paged_kivi_kernel
from workbench.kernels.attention.paged_rows import paged_rows_kernel
from workbench.kernels.checks import require
from workbench.kernels.layouts.pages import PageLayout
from workbench.spec.errors import UnsupportedInput

SHORT = 16  # tokens of a masked step at a ragged end
TILE = 64
FP4_TILE = 32
PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class OpenPages:
    """The newest tokens of a page-encoded format, in 16 bits.

    ``k``, ``v`` [rows, H, P, D]; sequence ``b`` has ``coded[b]`` tokens in full pages (a multiple of P) and
    the rest, at most P, in row ``row[b]``. ``coded``, ``row`` int32 [B].
    """

    k: Tensor
    v: Tensor
    coded: Tensor
    row: Tensor


def split_unit(layout: PageLayout) -> int:
    """What the length of a split must be a multiple of: a page begins where a split does, and a tile too."""
    return layout.page if layout.format.startswith("kivi") else math.lcm(layout.page, TILE)


def can_tma(layout: PageLayout, k: Tensor) -> bool:
    """Whether the copy engine can fetch tiles of these pages where they lie."""
    power = layout.dim & (layout.dim - 1) == 0 and layout.dim >= 16
    rows = len(k) * layout.heads * max(layout.page, layout.dim)
    fits = layout.page % TILE == 0 and power and rows < 2**31 and layout.format in (*PLAIN, "fp8", "int8")
    return fits and (not k.is_cuda or torch.cuda.get_device_capability(k.device) >= (9, 0))


def launch(
    grid: tuple[int, int, int],
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    planes: Mapping[str, Tensor],
    layout: PageLayout,
    index: tuple[Tensor, Tensor],
    numbers: Mapping[str, Any],
    tensor_scales: tuple[float, float],
    open_pages: OpenPages | None,
    tma: bool | None,
) -> str:
    """Start the kernel of ``layout.format``; ``index`` is block table and lengths. Returns the path taken."""
    common: dict[str, Any] = {"D": layout.dim, "P": layout.page, "num_warps": 4, **numbers}
    common["num_stages"] = stages(layout, planes["k"])
    k, v = planes["k"], planes["v"]
    if layout.format.startswith("kivi"):
        bits, group = (int(n) for n in layout.format.removeprefix("kivi").split("_"))
        require(
            group >= SHORT and group & (group - 1) == 0,
            f"Groups of {group} are not supported.",
            "Use groups of 16, 32 or 64.",
        )
        params = [planes[n] for n in ("k_min", "k_step", "v_min", "v_step")]
        if open_pages is None:
            raise UnsupportedInput(
                "KIVI pages need their open pages.", hint="Pass open_pages=OpenPages(...)."
            )
        newest = open_pages
        paged_kivi_kernel[grid](
            out, lse, q, k, v, *params, newest.k, newest.v, *index, newest.coded, newest.row,
            BITS=bits, GROUP=group, **common,
        )  # fmt: skip
        return f"{layout.format}, pointers"
    require(open_pages is None, f"{layout.format} pages have no open pages.", "Leave open_pages out.")
    if layout.format == "nvfp4":
        words = k.view(torch.int32), v.view(torch.int32)
        scales = planes["k_scale"], planes["v_scale"]
        paged_fp4_kernel[grid](
            out, lse, q, *words, *scales, *index, k_scale=tensor_scales[0], v_scale=tensor_scales[1],
            BN=FP4_TILE, BT=SHORT, **common,
        )  # fmt: skip
        return "nvfp4, pointers"
    tiles, path = plan_tiles(planes, layout, tma)
    common |= tiles.constants
    paged_rows_kernel[grid](out, lse, q, *tiles.tensors, *index, BN=TILE, BT=SHORT, **common)
    return path


def stages(layout: PageLayout, k: Tensor) -> int:
    """Tiles in flight: two, or one where two of K and V exceed shared memory (float32, large heads)."""
    return 1 if layout.dim * k.element_size() > 512 else 2


@dataclass(frozen=True)
class Tiles:
    """How the row formats are handed over: K, V, their descriptors and scales, and the format's constants."""

    tensors: tuple[Any, ...]
    constants: Mapping[str, Any]


def plan_tiles(planes: Mapping[str, Tensor], layout: PageLayout, tma: bool | None) -> tuple[Tiles, str]:
    """Tiles of plain, FP8 or INT8 pages, and the path in words. Raises ``UnsupportedInput`` for TMA in
    vain."""
    k, v = planes["k"], planes["v"]
    possible = can_tma(layout, k)
    require(
        possible or not tma,
        f"The copy engine cannot fetch tiles of {TILE} tokens from {layout.format} pages of {layout.page}.",
        "Use pages of 64 or 128 tokens on a Hopper GPU, or leave tma out.",
    )
    by_tma = possible if tma is None else tma
    format = "plain" if layout.format in PLAIN else layout.format
    v = v.view(torch.int32) if format == "int8" else v
    descriptors = _descriptors(k, v, format) if by_tma else (None, None)
    constants = {
        "D": layout.dim,
        "HD": 1 << (layout.dim - 1).bit_length(),
        "P": layout.page,
        "FMT": format,
        "TMA": by_tma,
    }
    tensors = (k, v, *descriptors, planes.get("k_scale"), planes.get("v_scale"))
    return Tiles(tensors, constants), f"{layout.format}, {'TMA' if by_tma else 'pointers'}"


def _descriptors(k: Tensor, v: Tensor, format: str) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Planes as matrices of rows, in blocks of one tile."""
    keys, values = (x.view(-1, x.shape[-1]) for x in (k, v))
    # FP8 values are transposed: dims by tokens.
    block = [k.shape[-1], TILE] if format == "fp8" else [TILE, values.shape[1]]
    return (
        TensorDescriptor.from_tensor(keys, [TILE, keys.shape[1]]),
        TensorDescriptor.from_tensor(values, block),
    )
