"""The arithmetic of ``fa3_fwd_fp8`` in plain torch, for errors at lengths that no emulator reaches.

Same codes and scales, same tiles from the last to the first, same casts: P as E4M3 of 2^8 P, everything else
in float32. Not simulated: the tensor core's narrower FP8 accumulator, which two-level accumulation is for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.attention.fp8_blocks import BLOCK, Fp8Blocks, blocks_of, packed_blocks
from workbench.kernels.layouts import permute
from workbench.numerics.e4m3 import from_e4m3, to_e4m3

LOG2_E, LN_2, LIFT = 1.4426950408889634, 0.6931471805599453, 8.0


def simulated(
    x: Fp8Blocks, *, causal: bool = True, scale: float | None = None, bn: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Output float32 [Tq, Hq, D] and LSE [Hq, Tq] of FP8 attention with KV tiles of ``bn`` tokens."""
    scale = x.q.shape[2] ** -0.5 if scale is None else scale
    factor = torch.repeat_interleave(x.q_scale, packed_blocks(x.q_lens)[:, 1], 0).T * scale * LOG2_E
    outs, lses, row = [], [], 0
    for pages, q_len, kv_len in zip(x.table, x.q_lens, x.kv_lens, strict=True):
        used = pages[: blocks_of(kv_len)].long()
        rows = slice(row, row + q_len)
        out, lse = _sequence(x, used, rows, kv_len, factor[:, rows], causal, bn)
        outs.append(out)
        lses.append(lse)
        row += q_len
    return torch.cat(outs), torch.cat(lses, 1)


def _sequence(
    x: Fp8Blocks, pages: Tensor, rows: slice, kv_len: int, factor: Tensor, causal: bool, bn: int
) -> tuple[Tensor, Tensor]:
    """One sequence, all heads at once: q [H, n, D] against tiles of keys."""
    repeat = x.q.shape[1] // x.k.shape[1]
    q = from_e4m3(x.q[rows].transpose(0, 1))
    n = q.shape[1]
    position = torch.arange(n)[:, None] + kv_len - n
    m = torch.full(q.shape[:2], -1.0e30)
    total, o = torch.zeros(q.shape[:2]), torch.zeros(q.shape)
    for tile in reversed(range(-(-kv_len // bn))):
        page, inner = pages[tile * bn // BLOCK], slice(tile * bn % BLOCK, tile * bn % BLOCK + bn)
        k = from_e4m3(x.k[page, :, inner]).repeat_interleave(repeat, 0)
        v = permute.restore(from_e4m3(x.v[page]))[:, :, inner].mT.repeat_interleave(repeat, 0)
        k_scale, v_scale = (s[page].repeat_interleave(repeat)[:, None] for s in (x.k_scale, x.v_scale))
        s = q @ k.mT * (factor * k_scale)[..., None]
        keys = torch.arange(tile * bn, tile * bn + bn)[None, :]
        seen = keys < kv_len
        s = s.masked_fill(~(seen & (keys <= position) if causal else seen.expand(n, bn)), float("-inf"))
        m_new = torch.maximum(m, s.amax(-1))
        p = torch.exp2(s - (m_new - LIFT)[..., None])
        alpha = torch.exp2(m - m_new)
        total = total * alpha + p.sum(-1)
        o = o * alpha[..., None] + from_e4m3(to_e4m3(p)) @ v * v_scale[..., None]
        m = m_new
    seen_any = total > 0
    total = total.masked_fill(~seen_any, 1.0)
    lse = ((m - LIFT + torch.log2(total)) * LN_2).masked_fill(~seen_any, float("-inf"))
    return (o / total[..., None]).transpose(0, 1), lse
