"""What an interrupted ``workbench sweep`` says: what is kept is kept, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.cli import tasks
from workbench.cli.start import HINT, MESSAGE
from workbench.spec.errors import Cancelled

Command = Callable[..., Any]


@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_sweep_says_that_it_goes_on_unless_nothing_could_be_kept(
    workbench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool
) -> None:
    place = tmp_path / "cache"
    if not kept:
        place.write_text("a file where the folder should be")
    monkeypatch.setenv("WORKBENCH_CACHE", str(place))

    def interrupted(job: Any, cancel: Any) -> Any:
        raise Cancelled(MESSAGE, hint=HINT)

    monkeypatch.setattr(tasks, "finished", interrupted)
    arguments = ("--model", "tiny", "--context", "128", "--score", "16", "--windows", "1", "--json")
    done = workbench("sweep", "kv", "--technique", "kv_int8", *arguments)
    assert done.status == 130 and done.json["message"] == MESSAGE
    assert ("goes on from there" in done.json["hint"]) is kept
