"""Files of trained drafters while a session is open: what cannot be used is said, what is new is used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.core.placed_virtual import Devices, simulate_mirror, simulate_swiftspec
from workbench.core.session import Session
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

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
