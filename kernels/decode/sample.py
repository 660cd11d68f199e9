"""Sampling: grammar mask, temperature, top-k, top-p, min-p, softmax, and a draw with the position's own
noise.

``law = softmax(filter(x / T))`` in the engine's order (mask, temperature, top-k, top-p, min-p), then the
token is ``argmax p / E`` with E exponential from Philox keyed by (seed, sample, position, stream): the
Gumbel-max trick, reproducible whatever the batch. A law is one program per row (`filters`), a draw one per
row and block of the vocabulary (`race`). Penalties belong to the logits that are passed in. On a GPU ``exp``
is approximate: laws differ from a CPU's in the last bits, so a nucleus that ends within them may end one
token apart.

Law: about 36 passes over a row of V float32 that stays in L2 (16 for top-k, 16 for top-p, when they are on);
bytes from and to memory: logits once, law once. Draw: law once, about 60 integer operations a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from workbench.kernels.checks import (
    require,
    require_contiguous,
    require_device,
    require_dtype,
    require_runnable,
    require_shape,
)
from workbench.kernels.decode.filters import law_kernel
from workbench.kernels.decode.noise import TOKEN
from workbench.kernels.decode.race import peak_kernel, race_kernel, winner_kernel
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import MaskError, RequestError

_BLOCK = 1024
_LAW_BLOCK, _LAW_WARPS = 2048, 16
_MOST_VOCABULARY = 1 << 20
_LOGITS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Noise:
    """Whose noise a row draws with: int64 [R] each (seeds as the bits of an unsigned number)."""

    seed: Tensor
    sample: Tensor
    position: Tensor

    @classmethod
    def rows(
        cls,
        seeds: Sequence[int],
        samples: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str,
    ) -> Noise:
        """From whole numbers in [0, 2**64)."""
        signed = [[n - 2**64 if n >= 2**63 else n for n in part] for part in (seeds, samples, positions)]
        return cls(*(torch.tensor(part, dtype=torch.int64, device=device) for part in signed))


@dataclass(frozen=True)
class Filters:
    """What each row filters by: float32, int32, float64 and float32 [R]; ``min_log`` is the log of min-p."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_log: Tensor

    @classmethod
    def rows(
        cls,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        device: torch.device | str,
    ) -> Filters:
        """From the settings of each row: ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off."""
        logs = [math.log(p) if p > 0 else -math.inf for p in min_p]
        tiny = torch.finfo(torch.float32).tiny
        hot = [t if t == 0 else max(t, tiny) for t in temperature]
        columns = ((hot, torch.float32), (top_k, torch.int32), (top_p, torch.float64), (logs, torch.float32))
        return cls(*(torch.tensor(list(part), dtype=kind, device=device) for part, kind in columns))


def pack_mask(allowed: Tensor) -> Tensor:
    """Boolean [R, V] as int32 words [R, ceil(V / 32)], token ``v`` in bit ``v % 32``."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32)).view(len(allowed), -1, 32)
    bits: Tensor = padded.long() << torch.arange(32, device=allowed.device)
    return bits.sum(-1).to(torch.int32)


def reference(logits: Tensor, filters: Filters, mask: Tensor | None = None) -> Tensor:
    """The law [R, V] in float64, row by row from the definition; ``mask`` boolean [R, V]."""
    out = torch.zeros(logits.shape, dtype=torch.float64)
    for r, row in enumerate(logits.cpu().double()):
        if mask is not None:
            row = row.masked_fill(~mask[r].cpu(), -torch.inf)
        order = torch.sort(row, descending=True, stable=True).indices
        temperature, k = float(filters.temperature[r]), int(filters.top_k[r])
        if temperature == 0:
            out[r, order[0]] = 1
            continue
        kept = order[:k] if k else order
        p = ((row[kept] - row[kept[0]]) / temperature).softmax(-1)
        n = int((p.cumsum(-1) - p < float(filters.top_p[r])).sum()) if float(filters.top_p[r]) < 1 else len(p)
        p, kept = p[:n], kept[:n]
        keep = p >= p[0] * math.exp(float(filters.min_log[r]))
        out[r, kept[keep]] = p[keep] / p[keep].sum()
    return out.to(logits.device)


def law(logits: Tensor, filters: Filters, mask: Tensor | None = None, *, check: bool = True) -> Tensor:
    """The law float32 [R, V] that each row is sampled from.

    ``logits`` [R, V] bf16, fp16 or fp32 (rows may be a view with a stride); ``mask`` int32 [R, ceil(V / 32)]
    as `pack_mask` makes it. With ``check`` a row whose mask allows nothing raises ``MaskError`` and one with
    NaN or +inf ``RequestError``; without it such rows are all 0 and nothing is read back. Raises
    ``UnsupportedInput`` for other inputs.
    """
    require_runnable("sample", logits)
    require_dtype("logits", logits, _LOGITS)
    require(logits.dim() == 2, f"logits are {tuple(logits.shape)}.", "They are [rows, vocabulary].")
    rows, vocabulary = logits.shape
    require(
        1 <= vocabulary <= _MOST_VOCABULARY, f"A vocabulary of {vocabulary} is not supported.", "1 to 2^20."
    )
    require(logits.stride(1) == 1, "logits are a transposed view.", "Pass logits.contiguous().")
    for name, x in vars(filters).items():
        require_shape(name, x, (rows,))
    require_device(logits, mask=mask, **vars(filters))
    if mask is not None:
        require_dtype("mask", mask, (torch.int32,))
        require_shape("mask", mask, (rows, -(-vocabulary // 32)))
        require_contiguous("mask", mask)
    out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    status = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    if rows:
        law_kernel[(rows,)](
            out, status, logits, mask, filters.temperature, filters.top_k, filters.top_p, filters.min_log,
            vocabulary, logits.stride(0), 0 if mask is None else mask.shape[1],
            MASK=mask is not None, BV=_fitting(vocabulary, _LAW_BLOCK), num_warps=_LAW_WARPS,
        )  # fmt: skip
    if check and rows:
        _raise(status)
    return out


def draw(p: Tensor, noise: Noise, stream: int = TOKEN) -> Tensor:
    """Token ids int64 [R] drawn from the laws ``p`` float32 or float64 [R, V]; -1 for a law of zeros."""
    require_runnable("sample", p)
    require_dtype("p", p, (torch.float32, torch.float64))
    require(p.dim() == 2 and p.stride(1) == 1, f"p is {tuple(p.shape)}, strides {p.stride()}.", "[rows, V].")
    rows, vocabulary = p.shape
    require(
        1 <= vocabulary <= _MOST_VOCABULARY, f"A vocabulary of {vocabulary} is not supported.", "1 to 2^20."
    )
    for name, x in vars(noise).items():
        require_dtype(name, x, (torch.int64,))
        require_shape(name, x, (rows,))
    require_device(p, **vars(noise))
    block = _fitting(vocabulary, _BLOCK)
    blocks = -(-vocabulary // block)
    token = torch.empty(rows, dtype=torch.int64, device=p.device)
    if not rows:
        return token
    best = torch.empty((rows, blocks), dtype=torch.float64, device=p.device)
    ids = torch.empty((rows, blocks), dtype=torch.int32, device=p.device)
    race_kernel[(rows, blocks)](
        best,
        ids,
        p,
        noise.seed,
        noise.sample,
        noise.position,
        vocabulary,
        p.stride(0),
        STREAM=stream,
        BV=block,
    )
    winner_kernel[(rows,)](token, best, ids, 0.0, blocks, NP=triton.next_power_of_2(blocks), num_warps=1)
    return token


def best(scores: Tensor) -> Tensor:
    """The highest score's id int64 [R] of each row [R, V], lowest id on ties; -1 for a row of NaN or -inf."""
    require_runnable("sample", scores)
    require_dtype("scores", scores, _LOGITS)
    require(scores.dim() == 2 and scores.stride(1) == 1, f"scores are {tuple(scores.shape)}.", "[rows, V].")
    rows, vocabulary = scores.shape
    block = _fitting(vocabulary, 4 * _BLOCK)
    blocks = -(-vocabulary // block)
    token = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if not rows:
        return token
    top = torch.empty((rows, blocks), dtype=torch.float64, device=scores.device)
    ids = torch.empty((rows, blocks), dtype=torch.int32, device=scores.device)
    peak_kernel[(rows, blocks)](top, ids, scores, vocabulary, scores.stride(0), BV=block)
    winner_kernel[(rows,)](token, top, ids, -math.inf, blocks, NP=triton.next_power_of_2(blocks), num_warps=1)
    return token


def sample(
    logits: Tensor, filters: Filters, noise: Noise, mask: Tensor | None = None, *, check: bool = True
) -> tuple[Tensor, Tensor]:
    """Token ids int64 [R] and the laws float32 [R, V] they were drawn from; see :func:`law` and
    :func:`draw`."""
    p = law(logits, filters, mask, check=check)
    return draw(p, noise), p


def _fitting(vocabulary: int, most: int) -> int:
    """Block of the vocabulary: no larger than it needs to be. Neither laws nor draws depend on it."""
    return int(min(most, max(16, triton.next_power_of_2(vocabulary))))


def _raise(status: Tensor) -> None:
    """Turn a row's status into the engine's errors."""
    found = status.cpu()
    if bool((found == 2).any()):
        raise RequestError(
            f"The logits of row {int((found == 2).nonzero()[0])} are not finite.",
            hint="Use a wider dtype, or find the layer that overflows.",
        )
    if bool((found == 1).any()):
        raise MaskError(
            f"The mask of row {int((found == 1).nonzero()[0])} allows no token at all.",
            hint="Let the mask allow an end token where its language ends.",
        )


def _law_cost(rows: int, vocabulary: int, itemsize: int = 2, filtered: bool = True) -> Cost:
    """Comparisons and sums count as operations; the row is read from memory once, then from L2."""
    passes = 32 * 8 + 4 if filtered else 4
    return Cost(rows * vocabulary * passes, rows * vocabulary * (itemsize + 4))


def _race_cost(rows: int, vocabulary: int, itemsize: int = 4) -> Cost:
    return Cost(rows * vocabulary * 60, rows * vocabulary * itemsize)


_QUIET = {"spills": Bound(0, 0), "stack": Bound(0, 0)}
_LAW = {"law": "*fp32", "status": "*i32", "logits": "*bf16", "words": "*i32", "temperatures": "*fp32"}
_LAW |= {"top_ks": "*i32", "top_ps": "*fp64", "min_logs": "*fp32", "V": "i32", "stride": "i32", "W": "i32"}
_RACE = {"best": "*fp64", "ids": "*i32", "law": "*fp32", "seeds": "*i64", "samples": "*i64"}
_RACE |= {"positions": "*i64", "V": "i32", "stride": "i32"}

# Four candidates a pass keep the row's block in registers; more warps would not help a row that is one
# program.
KERNELS = (
    Kernel(
        "sample_law", "Mask, temperature, top-k, top-p, min-p and softmax without a sort", "triton",
        "order and ties of workbench.engine.processing", law_kernel,
        (
            Build(
                "bf16 logits, mask", _LAW, {"MASK": True, "BV": _LAW_BLOCK}, num_warps=_LAW_WARPS,
                aligned=("law", "logits", "words", "V", "stride"), sass={**_QUIET, "regs": Bound(0, 64)},
            ),
        ),
        _law_cost,
    ),
    Kernel(
        "sample_race", "A draw with the position's own noise: Philox4x64 and an exponential race", "triton",
        "Philox, Salmon et al., SC 2011; the Gumbel-max trick", race_kernel,
        (
            Build(
                "float32 law", _RACE, {"STREAM": TOKEN, "BV": _BLOCK}, aligned=("law", "V", "stride"),
                sass={**_QUIET, "regs": Bound(0, 80)},
            ),
        ),
        _race_cost,
    ),
    Kernel(
        "sample_peak", "The highest score of each block of a row", "triton", "argmax", peak_kernel,
        (
            Build(
                "bf16 scores", {"best": "*fp64", "ids": "*i32", "x": "*bf16", "V": "i32", "stride": "i32"},
                {"BV": 4 * _BLOCK}, aligned=("x", "V", "stride"), sass={**_QUIET, "regs": Bound(0, 96)},
            ),
        ),
        lambda rows, vocabulary, itemsize=2: Cost(rows * vocabulary, rows * vocabulary * itemsize),
    ),
    Kernel(
        "sample_winner", "The best of the blocks of a race", "triton", "the Gumbel-max trick", winner_kernel,
        (
            Build(
                "148 blocks", {"token": "*i64", "best": "*fp64", "ids": "*i32", "floor": "fp32", "N": "i32"},
                {"NP": 256},
                num_warps=1, sass={**_QUIET, "regs": Bound(0, 48)},
            ),
        ),
        lambda rows, blocks: Cost(rows * blocks, rows * blocks * 12),
    ),
)  # fmt: skip
