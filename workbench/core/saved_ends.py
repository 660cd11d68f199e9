"""What a drafter reads behind the pages of a saved conversation: a stream of its own beside the codec's.

A page's rows of the drafter come along bit for bit; the row behind a prefix reads the target's state of the
last token in it, which is not among them (:mod:`workbench.engine.page_ends`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from workbench.engine.at_rest import Bytes, Coded
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.engine import Engine
from workbench.spec.errors import PayloadError

ENDS = "ends"


def with_ends(coded: Coded, ends: Mapping[int, Tensor], pages: int) -> Coded:
    """``coded`` with the states [pages, W] behind its pages; without, unless every page has one."""
    if set(ends) != set(range(pages)):
        return coded
    rows = torch.stack([ends[page] for page in range(pages)]).cpu()
    stream: Bytes = rows.view(-1).view(torch.uint8).numpy().data
    return Coded(coded.header, {**coded.streams, ENDS: stream})


def ends_of(coded: Coded, engine: Engine, pages: int) -> dict[int, Tensor]:
    """The inverse, by page; empty where none were saved, or where the drafter here reads none.

    Raises :class:`PayloadError` for states that are not as wide as those the drafter reads.
    """
    runner = engine.drafting.runner
    like = runner.end if isinstance(runner, DraftRunner) else None
    data = coded.streams.get(ENDS)
    if data is None or like is None:
        return {}
    if len(data) != pages * like.nbytes:
        raise PayloadError(
            f"It holds {len(data):,} bytes of what a drafter reads behind {pages} pages; here they take "
            f"{pages * like.nbytes:,}.",
            hint="Resume with the drafter that saved it.",
        )
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    rows = flat.view(like.dtype).view(pages, -1).to(like.device)
    return {page: row.clone() for page, row in enumerate(rows)}
