"""One attention row, KV tile by KV tile: what FlashAttention keeps between tiles, in plain torch.

    m' = max(m, max s),  a = 2^(m - m'),  l' = a l + sum 2^(s - m'),  o' = a o + 2^(s - m') V;  out = o / l

(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135, algorithm 1) with scores in log2, as
the kernels have them. Tiles go from the last to the first like those of `fa3_kernel`, or the other way round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.spec.errors import UnsupportedInput

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class TileStep:
    """State after one tile of keys ``first .. end``.

    ``top``: running maximum in log2 units; ``rescaled``: the factor a on all that was summed before (0 for
    the first tile); ``total``: l; ``out`` [D]: o, not yet divided by l.
    """

    first: int
    end: int
    top: float
    rescaled: float
    total: float
    out: Tensor

    @property
    def normalised(self) -> Tensor:
        """o / l: attention over the keys seen so far."""
        return self.out / self.total


def scores(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """Scores in log2 units, float64 [n], of a query [D] and keys [n, D]."""
    return (k.double() @ q.double()) * (scale * LOG2_E)


def walk(
    q: Tensor, k: Tensor, v: Tensor, tile: int, *, scale: float = 1.0, last_first: bool = True
) -> list[TileStep]:
    """The states after each tile of ``tile`` keys; ``q`` [D], ``k`` and ``v`` [n, D]; float64 inside.

    Raises ``UnsupportedInput`` for shapes that do not belong together, no keys, or a tile below 1.
    """
    if q.ndim != 1 or k.ndim != 2 or k.shape[1] != q.shape[0] or v.shape[:1] != k.shape[:1] or not len(k):
        raise UnsupportedInput(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} are no attention row.",
            hint="q is [D], k is [n, D], v is [n, D], n at least 1.",
        )
    if tile < 1:
        raise UnsupportedInput(f"A tile of {tile} keys.", hint="Use at least 1.")
    s, v = scores(q, k, scale), v.double()
    firsts = range(0, len(s), tile)
    top, total, out = -math.inf, 0.0, torch.zeros(v.shape[1], dtype=torch.float64)
    steps = []
    for first in reversed(firsts) if last_first else firsts:
        part = s[first : first + tile]
        new_top = max(top, float(part.max()))
        rescaled = 2.0 ** (top - new_top)
        p = torch.exp2(part - new_top)
        total = rescaled * total + float(p.sum())
        out = rescaled * out + p @ v[first : first + tile]
        top = new_top
        steps.append(TileStep(first, first + len(part), top, rescaled, total, out))
    return steps
