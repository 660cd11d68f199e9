"""Four-bit weights as GPTQ, AWQ and compressed-tensors checkpoints store them, into the kernel's layout.

GPTQ (AutoGPTQ, GPTQModel): ``qweight`` int32 [K/8, N], eight inputs a word, lowest first; ``qzeros`` int32
[G, N/8] holding the zero minus 1 in format 1, as it is in format 2; ``scales`` [G, N]; ``g_idx`` [K], the
group of each input. AWQ ("gemm"): ``qweight`` int32 [K, N/8] along the outputs in the order 0 2 4 6 1 3 5 7,
``qzeros`` likewise, ``scales`` [G, N]. compressed-tensors ("pack-quantized"): ``weight_packed`` int32
[N, K/8] of code + 8, ``weight_scale`` [N, G], optional ``weight_zero_point`` int32 [N/8, G] along outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.layouts.w4 import W4, pack_w4
from workbench.spec.errors import UnsupportedInput, WrongShape

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLAIN_ORDER = tuple(range(8))


def pack_words(codes: Tensor, dim: int, order: tuple[int, ...] = _PLAIN_ORDER) -> Tensor:
    """Eight codes 0..15 along ``dim`` in an int32 word: nibble ``i`` holds code ``order[i]`` of the eight."""
    grouped = codes.to(torch.int32).movedim(dim, 0).unflatten(0, (-1, 8))
    word = torch.zeros_like(grouped[:, 0])
    for i, at in enumerate(order):
        word |= grouped[:, at] << (4 * i)
    return word.movedim(0, dim).contiguous()


def unpack_words(words: Tensor, dim: int, order: tuple[int, ...] = _PLAIN_ORDER) -> Tensor:
    """The codes (uint8) that :func:`pack_words` packed: eight times as many along ``dim``."""
    first = words.movedim(dim, 0)
    nibbles = torch.stack([(first >> (4 * order.index(i))) & 15 for i in range(8)], 1)
    return nibbles.flatten(0, 1).movedim(0, dim).to(torch.uint8).contiguous()


def from_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor,
    *,
    g_idx: Tensor | None = None,
    version: int = 1,
) -> tuple[W4, Tensor | None]:
    """The kernel's layout of a GPTQ linear, and the order of its inputs.

    With activation order (``g_idx`` not rising) the inputs are sorted by group: multiply ``x[:, order]``.
    ``order`` int64 [K] is None when nothing moved. Raises ``WrongShape`` and ``UnsupportedInput``.
    """
    _require_words("qweight", qweight)
    codes = unpack_words(qweight, 0).T
    groups, group = scales.shape[0], _group(codes.shape[1], scales.shape[0])
    zeros = unpack_words(qzeros, 1).to(torch.int32) + (1 if version == 1 else 0)
    order = None
    if g_idx is not None and not torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group):
        counts = torch.bincount(g_idx.long(), minlength=groups)
        if len(counts) != groups or bool((counts != group).any()):
            raise UnsupportedInput(
                f"g_idx puts {counts.tolist()} inputs into {groups} groups of {group}.",
                hint="Groups of unequal size cannot be sorted into the kernel's layout.",
            )
        order = torch.argsort(g_idx.long(), stable=True)
        codes = codes[:, order]
    return pack_w4(codes.contiguous(), scales.T.contiguous(), zeros=zeros.T.contiguous(), group=group), order


def from_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> W4:
    """The kernel's layout of an AWQ ("gemm") linear. Raises ``WrongShape``."""
    _require_words("qweight", qweight)
    codes = unpack_words(qweight, 1, AWQ_ORDER).T.contiguous()
    zeros = unpack_words(qzeros, 1, AWQ_ORDER).T.contiguous()
    group = _group(codes.shape[1], scales.shape[0])
    return pack_w4(codes, scales.T.contiguous(), zeros=zeros, group=group)


def from_compressed_tensors(
    weight_packed: Tensor, weight_scale: Tensor, zero_point: Tensor | None = None
) -> W4:
    """The kernel's layout of a compressed-tensors linear ("pack-quantized"); symmetric without zeros."""
    _require_words("weight_packed", weight_packed)
    codes = unpack_words(weight_packed, 1)
    zeros = None if zero_point is None else unpack_words(zero_point, 0)
    group = _group(codes.shape[1], weight_scale.shape[1])
    return pack_w4(codes, weight_scale.contiguous(), zeros=zeros, group=group)


def _require_words(name: str, words: Tensor) -> None:
    if words.dtype != torch.int32 or words.ndim != 2:
        raise WrongShape(
            f"{name} is {words.dtype} {tuple(words.shape)}, not a matrix of int32 words.",
            hint="Only four-bit checkpoints are read.",
        )


def _group(k: int, groups: int) -> int:
    if groups < 1 or k % groups:
        raise WrongShape(f"{k} inputs do not divide into {groups} groups.", hint="Check the group size.")
    return k // groups
