"""Which slots a row may not see, as boolean tensors (True = hidden), for the fast form.

Chains and windows are two comparisons with one number per row; only the block of new rows of a draft tree
needs a matrix. Masks are filled in place, so a step in which only lengths moved allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.attention.spans import Bools, Ints, ancestors, is_chain, shift
from workbench.engine.seams import AttentionSpan


def plain(span: AttentionSpan, window: int | None) -> bool:
    """True when two limits per row describe the mask: a chain, at consecutive positions if windowed."""
    if not is_chain(span.parents):
        return False
    return window is None or span.n_new < 2 or span.positions[-1] - span.positions[0] == span.n_new - 1


def new_block(span: AttentionSpan, window: int | None) -> Bools:
    """Boolean ``[n_new, n_new]``: new row ``i`` may not see new row ``j``."""
    hidden = ~ancestors(span.parents, span.n_new)
    if window is not None:
        at = np.asarray(span.positions)
        hidden |= at[None, :] <= at[:, None] - window
    return hidden


def limits(span: AttentionSpan, window: int | None, origin: int) -> tuple[Ints, Ints | None]:
    """Per row the last visible column and (windowed) the last column behind the window.

    Columns count slots from slot ``origin``. For a tree they describe the committed slots only.
    """
    rows = np.arange(span.n_new, dtype=np.int64)
    high = np.full_like(rows, span.start - 1 - origin)
    if plain(span, window):
        high += rows + 1
    if window is None:
        return high, None
    low = np.asarray(span.positions, dtype=np.int64) - shift(span) - window - origin
    return high, low


def fill_hidden(
    out: Tensor, columns: Tensor, spans: Sequence[AttentionSpan], origins: Sequence[int], window: int | None
) -> int:
    """Write ``out`` [R, n] for the rows of ``spans``; span ``i``'s column 0 is its slot ``origins[i]``.

    ``columns`` int64 [n] is ``arange(n)`` on ``out``'s device. Returns a column before which nothing is
    hidden.
    """
    if window is None and all(s.n_new == 1 for s in spans):
        high = np.array([s.start - o for s, o in zip(spans, origins, strict=True)], dtype=np.int64)
        torch.gt(columns, torch.from_numpy(high).to(out.device)[:, None], out=out)
        return int(high.min()) + 1
    both = [limits(s, window, o) for s, o in zip(spans, origins, strict=True)]
    high = np.concatenate([h for h, _ in both])
    torch.gt(columns, torch.from_numpy(high).to(out.device)[:, None], out=out)
    if window is not None:
        low = np.concatenate([b for _, b in both if b is not None])
        out |= columns <= torch.from_numpy(low).to(out.device)[:, None]
    row = 0
    for span, origin in zip(spans, origins, strict=True):
        if not plain(span, window):
            at = span.start - origin
            block = torch.from_numpy(new_block(span, window)).to(out.device)
            out[row : row + span.n_new, at : at + span.n_new] = block
        row += span.n_new
    return int(high.min()) + 1 if window is None else 0
