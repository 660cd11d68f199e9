"""What a prefill attention kernel is asked, checked once: shapes, lengths, mask, soft-cap, page table.

Queries of all sequences are packed ``[Tq, Hq, D]``. Keys and values are packed likewise ``[Tk, Hkv, D]``, or
lie in pages ``[pages, Hkv, P, D]`` reached through a table int32 ``[sequences, width]``. The mask is aligned
at the bottom right: query i of a sequence with q_len queries and kv_len keys stands at kv_len - q_len + i,
which is what chunked prefill needs; a row that sees no key gives zero and an LSE of -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.spec.errors import UnsupportedInput


@dataclass(frozen=True)
class Attended:
    """Output ``[Tq, Hq, D]`` in the dtype of q, LSE float32 ``[Hq, Tq]`` (natural log), the path taken."""

    out: Tensor
    lse: Tensor
    path: str


@dataclass(frozen=True)
class Problem:
    """A checked request: lengths per sequence and what a query sees.

    ``window`` counts the keys a query sees, itself included (0: all; needs ``causal``). ``softcap`` c maps a
    score s to c tanh(s / c) (0: none). ``scale`` multiplies the raw scores.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    window: int
    softcap: float
    scale: float
    table: Tensor | None = None


def checked(
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
) -> Problem:
    """The request as a ``Problem``; raises ``UnsupportedInput`` naming what does not fit."""
    rank = 3 if table is None else 4
    if q.ndim != 3 or k.ndim != rank or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        want = "[Tk, Hkv, D]" if table is None else "[pages, Hkv, P, D]"
        _refuse(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not belong together.",
            f"q is [Tq, Hq, D]; k and v are {want}.",
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device, k.device, v.device}) > 1:
        _refuse("q, k and v differ in dtype or device.", "Convert them first.")
    if q.shape[1] % k.shape[1]:
        _refuse(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly.", "Hq is a multiple of Hkv."
        )
    if len(q_lens) != len(kv_lens) or min([*q_lens, *kv_lens], default=0) < 0 or sum(q_lens) != q.shape[0]:
        _refuse(
            f"Lengths {list(q_lens)} and {list(kv_lens)} do not describe {q.shape[0]} queries.",
            "Give one length per sequence; the query lengths add up to Tq.",
        )
    if table is None:
        if sum(kv_lens) != k.shape[0]:
            _refuse(f"KV lengths add up to {sum(kv_lens)}, k has {k.shape[0]} rows.", "They must agree.")
    else:
        _check_table(table, k, kv_lens)
    if window < 0 or (window and not causal):
        _refuse(f"A window of {window} without a causal mask.", "Use causal=True, window >= 1, or window=0.")
    if softcap < 0 or not math.isfinite(softcap):
        _refuse(f"A soft-cap of {softcap}.", "Use a positive number, or 0 for none.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not 0 < scale < math.inf:
        _refuse(f"A scale of {scale}.", "Use a positive number: the running maximum is taken before scaling.")
    return Problem(
        tuple(int(n) for n in q_lens),
        tuple(int(n) for n in kv_lens),
        causal,
        window,
        softcap,
        scale,
        table,
    )


def _check_table(table: Tensor, k: Tensor, kv_lens: Sequence[int]) -> None:
    size = k.shape[2]
    if table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != len(kv_lens):
        _refuse(
            f"The page table is {table.dtype} {tuple(table.shape)}.",
            "It is int32 [sequences, pages per sequence].",
        )
    if not table.is_contiguous() or table.device != k.device:
        _refuse(
            "The page table must be contiguous and on the device of k.",
            "Use table.contiguous().to(k.device).",
        )
    if max(kv_lens, default=0) > table.shape[1] * size:
        _refuse(f"{max(kv_lens)} keys do not fit {table.shape[1]} pages of {size}.", "Widen the page table.")


def _refuse(what: str, way_out: str) -> None:
    raise UnsupportedInput(what, hint=way_out)


def gathered(k: Tensor, problem: Problem) -> list[Tensor]:
    """Keys (or values) of each sequence, ``[kv_len, Hkv, D]``, from packed rows or pages."""
    if problem.table is None:
        return list(torch.split(k, list(problem.kv_lens)))
    found = []
    for row, length in zip(problem.table, problem.kv_lens, strict=True):
        used = row[: -(-length // k.shape[2])].long()
        found.append(k[used].transpose(1, 2).flatten(0, 1)[:length])
    return found


def reference(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Attention written out: out ``[Tq, Hq, D]`` and LSE ``[Hq, Tq]``, both in ``dtype``.

    With ``dtype`` the inputs' own it is the plain path of that precision, whose error a kernel may double.
    """
    outs, lses = [], []
    keys, values = gathered(k, problem), gathered(v, problem)
    for qs, ks, vs in zip(torch.split(q, list(problem.q_lens)), keys, values, strict=True):
        repeat = q.shape[1] // k.shape[1]
        ks, vs = (x.to(dtype).repeat_interleave(repeat, 1).transpose(0, 1) for x in (ks, vs))
        s = (qs.to(dtype).transpose(0, 1) @ ks.mT) * problem.scale
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        q_len, kv_len = s.shape[-2:]
        position = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len
        key = torch.arange(kv_len, device=q.device)[None, :]
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
        if problem.causal:
            seen &= key <= position
        if problem.window:
            seen &= key > position - problem.window
        s = s.masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(s.float() if dtype.itemsize < 4 else s, -1)
        p = torch.softmax(s, -1).masked_fill(~seen, 0.0)
        outs.append((p @ vs).transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)
