"""Files of trained drafters while a session is open: what cannot be used is said, what is new is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from workbench.core.placed_virtual import Devices, simulate_mirror, simulate_swiftspec
from workbench.core.session import Session
from workbench.models.datadir import data_dir
from workbench.models.heads import read_head, write_head
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

TEXT = "def area(width, height):\n    return width"
ASKED = {"max_tokens": 16, "ignore_eos": True}
SLOW = Devices(target=0.020, draft=0.002, link=0.001)


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where heads of ``tiny`` are looked for before those that are shipped."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    folder = tmp_path / "heads" / "tiny"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def session(heads: Path) -> Iterator[Session]:
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    with Session("tiny", limits=limits, dtype="float32", numerics="pinned") as made:
        yield made


def test_a_run_notes_a_draft_model_that_is_damaged(session: Session, heads: Path) -> None:
    path = heads / "draft.safetensors"
    path.write_bytes(b"half of a head")
    plain = session.generate(TEXT, **ASKED)
    session.apply(Recipe.of("draft_model")).result(timeout=120)
    first, second = session.generate(TEXT, **ASKED), session.generate(TEXT, **ASKED)
    assert plain.token_ids == first.token_ids == second.token_ids
    assert sum(str(path) in note for note in first.notes) == 1
    assert not any(str(path) in note for note in second.notes)
    assert str(path) in simulate_swiftspec(session, TEXT, SLOW, tokens=4).notes[0]
    (heads / "exit_adapter.safetensors").write_bytes(b"half of an adapter")
    notes = simulate_mirror(session, TEXT, SLOW, tokens=4).notes
    assert len(notes) == 2 and "exit_adapter.safetensors" in notes[1]
    path.unlink()
    session.apply(Recipe.of("draft_model")).result(timeout=120)
    assert not any("draft_model" in note for note in session.generate(TEXT, **ASKED).notes)


def test_a_draft_model_that_was_trained_anew_drafts_from_the_next_recipe_on(
    session: Session, heads: Path
) -> None:
    """The process goes on while its file stays what it was, and is another one where it does not."""
    shipped = read_head(data_dir() / "heads" / "tiny" / "draft.safetensors")
    others = {p.pid for p in psutil.Process().children()}

    def drafts() -> tuple[int, Run]:
        """Pid of the drafter's process with the next recipe, and what it did."""
        session.apply(Recipe.of("swiftspec:source=trained,pin=false,wait=5000")).result(timeout=120)
        (pid,) = {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE} - others
        return pid, session.generate(TEXT, **ASKED)

    plain = session.generate(TEXT, **ASKED)
    first, good = drafts()
    assert drafts()[0] == first
    blank = {n: torch.zeros_like(t) if "proj" in n else t for n, t in shipped.tensors().items()}
    write_head(heads / "draft.safetensors", shipped.kind, shipped.fingerprint, shipped.facts, blank)
    second, bad = drafts()
    assert second != first and drafts()[0] == second
    assert plain.token_ids == good.token_ids == bad.token_ids
    assert good.acceptance["accepted"] > bad.acceptance["accepted"]
