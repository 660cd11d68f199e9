"""What shipped heads say of themselves: acceptance falls with every step on their own states."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from workbench.models.datadir import data_dir
from workbench.models.heads import read_head

STEPPING = sorted(
    path for kind in ("eagle", "eagle3", "fasteagle") for path in (data_dir() / "heads").glob(f"*/{kind}.*")
)


@pytest.mark.parametrize("path", STEPPING, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_what_a_head_drafts_behind_its_own_drafts_is_taken_less_often(path: Path) -> None:
    """0-alpha > 1-alpha > 2-alpha, teacher-forced: states that are its own cost acceptance."""
    held = read_head(path).facts["held_out"]
    alpha = held["alpha"]
    assert len(alpha) >= 3
    assert all(after < before for before, after in pairwise(alpha))
    assert all(0 < share <= alpha[0] <= held["covered"] for share in alpha)
    survival = held["full"]
    assert all(after < before for before, after in pairwise(survival))
    assert held["chain"] == pytest.approx(1 + sum(survival), abs=1e-3)
