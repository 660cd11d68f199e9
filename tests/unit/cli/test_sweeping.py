"""``workbench sweep``: its table in a file, and what it says when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cli import tasks
from workbench.cli.kv_tables import print_methods
from workbench.cli.start import HINT, MESSAGE
from workbench.spec.errors import Cancelled
from workbench.spec.run import Metric

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


def test_off_a_terminal_every_method_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("kl", "codec_ratio", "whole_ratio", "top1", "perplexity_change", "encode_rate", "decode_rate")
    names += ("artefact", "artefact_share", "break_even")
    metrics = {n: Metric(n, 0.012345678, "", n=2, spread=(0.000637, 0.000653)) for n in names}
    method = "cachegen:delta=true,k=16/10/8,v=16/10/8,chunk=160"
    run: Any = SimpleNamespace(
        subject=method, metric=metrics.get, notes=(), provenance=None, model="tiny", dtype="float32"
    )
    print_methods([run] * 3)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(method) and "0.000637 … 0.000653" in line for line in lines) == 3
    assert len(lines) == 5
