"""FP8 attention inputs in blocks of 128 tokens: what ``fp8_prepare`` writes and ``fa3_fwd_fp8`` reads.

One float32 scale per (block, head), FlashAttention-3's block quantization (arXiv 2407.08608, section 3.3). K
and V lie in pages of one block, so that a cache can hold them; V is transposed with the tokens of every 16
permuted (``layouts.permute``). Slots behind the end of a sequence are zero in V: 0 x NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.layouts import permute
from workbench.numerics.e4m3 import from_e4m3
from workbench.spec.errors import UnsupportedInput

BLOCK = 128
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Blocks:
    """Codes, scales, page table and lengths of one call, all contiguous.

    ``q`` E4M3 [Tq, Hq, D] with ``q_scale`` float32 [query blocks, Hq], blocks beginning with each sequence;
    ``k`` E4M3 [N, Hkv, 128, D], ``v`` E4M3 [N, Hkv, D, 128], ``k_scale`` and ``v_scale`` float32 [N, Hkv];
    ``table`` int32 [sequences, width] of page numbers; lengths in tokens per sequence.
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor
    table: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def check(self) -> None:
        """Raises ``UnsupportedInput`` for shapes, dtypes or strides that do not belong together."""
        heads, dim = self.q.shape[1:] if self.q.ndim == 3 else (0, 0)
        pages, kv_heads = self.k.shape[:2] if self.k.ndim == 4 else (0, 0)
        wanted = {
            "q": (E4M3, (sum(self.q_lens), heads, dim)),
            "q_scale": (torch.float32, (sum(map(blocks_of, self.q_lens)), heads)),
            "k": (E4M3, (pages, kv_heads, BLOCK, dim)),
            "v": (E4M3, (pages, kv_heads, dim, BLOCK)),
            "k_scale": (torch.float32, (pages, kv_heads)),
            "v_scale": (torch.float32, (pages, kv_heads)),
            "table": (torch.int32, (len(self.kv_lens), self.table.shape[-1])),
        }
        for name, (dtype, shape) in wanted.items():
            x: Tensor = getattr(self, name)
            if (
                x.dtype != dtype
                or tuple(x.shape) != shape
                or not x.is_contiguous()
                or x.device != self.q.device
            ):
                raise UnsupportedInput(
                    f"{name} is {x.dtype} {tuple(x.shape)}, not a contiguous {dtype} {shape} beside q.",
                    hint="Use what fp8_prepare returns.",
                )
        if len(self.q_lens) != len(self.kv_lens) or (kv_heads and heads % kv_heads):
            raise UnsupportedInput(
                f"Heads: {heads} and {kv_heads}; lengths: {len(self.q_lens)} and {len(self.kv_lens)}.",
                hint="Hq is a multiple of Hkv; one length per sequence.",
            )
        if max(map(blocks_of, self.kv_lens), default=0) > self.table.shape[1]:
            raise UnsupportedInput("The page table is too narrow for the KV lengths.", hint="Widen it.")


def blocks_of(length: int) -> int:
    """Blocks of 128 tokens that ``length`` tokens fill or begin."""
    return -(-length // BLOCK)


def packed_blocks(lens: Sequence[int]) -> Tensor:
    """First row and valid rows of every block of packed sequences, int32 [blocks, 2]."""
    found, row = [], 0
    for length in lens:
        first = torch.arange(0, length, BLOCK)
        found.append(torch.stack([row + first, (length - first).clamp(max=BLOCK)], 1))
        row += length
    return torch.cat(found).to(torch.int32) if found else torch.zeros(0, 2, dtype=torch.int32)


def packed_table(lens: Sequence[int]) -> Tensor:
    """Page table of sequences one after the other, int32 [sequences, most blocks]; unused entries 0."""
    counts = [blocks_of(n) for n in lens]
    table = torch.zeros(len(counts), max([1, *counts]), dtype=torch.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return table


def restored(x: Fp8Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Values that the codes stand for, float32: q [Tq, Hq, D], k and v [Tk, Hkv, D] packed."""
    index = [b for b, n in enumerate(map(int, packed_blocks(x.q_lens)[:, 1])) for _ in range(n)]
    q = from_e4m3(x.q) * x.q_scale[index][..., None]
    pages = torch.cat([row[: blocks_of(n)] for row, n in zip(x.table, x.kv_lens, strict=True)]).long()
    raw = x.k.view(torch.uint8)[pages].view(E4M3), x.v.view(torch.uint8)[pages].view(E4M3)
    k = from_e4m3(raw[0]) * x.k_scale[pages][..., None, None]
    v = from_e4m3(permute.restore(raw[1])).mT * x.v_scale[pages][..., None, None]
    kept, first = [], 0
    for length in x.kv_lens:
        kept.append(torch.arange(first, first + length))
        first += blocks_of(length) * BLOCK
    rows = torch.cat(kept)
    k, v = (y.transpose(1, 2).flatten(0, 1)[rows] for y in (k, v))
    return q, k, v
