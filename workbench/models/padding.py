"""Rectangular batches for libraries that need them: left padding, with the mask from lengths.

The engine itself is ragged and never pads. Peers it is compared with (``transformers``) do, and the
two classic mistakes are made here by nobody: a mask guessed from ids, which hides a real EOS when
padding uses the same id, and right padding, which makes a decoder continue from padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.spec.errors import EmptyPrompt


def left_padded(
    rows: Sequence[Sequence[int]], pad_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(ids, mask, positions)``, each int64 ``[len(rows), longest row]``.

    The mask is 1 where a row has tokens; positions count from the first of them, and are 0 on padding.
    Any ``pad_id`` gives the same result of the model. Raises ``EmptyPrompt``.
    """
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) == 0:
        raise EmptyPrompt("A batch needs rows, and each row needs tokens.", hint="Drop empty prompts.")
    width = max(lengths)
    ids = torch.tensor([[pad_id] * (width - len(row)) + [int(i) for i in row] for row in rows])
    columns = torch.arange(width).expand(len(rows), width)
    positions = columns - (width - torch.tensor(lengths))[:, None]
    mask = (positions >= 0).long()
    return ids, mask, positions.clamp(min=0)
