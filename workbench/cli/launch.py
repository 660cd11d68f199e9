"""``workbench fetch``, ``lab`` and ``doctor``: get a model, open the notebooks, look at the machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import options as o
from workbench.cli.copies import refresh
from workbench.cli.output import Meter, interruptible, note, out, print_json
from workbench.spec.errors import MissingExtra, ModelNotFound, StorageError

START = "00_start.ipynb"


def fetch_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model of the registry, or a .gguf file.")],
    json: o.Json = False,
) -> None:
    """Download and convert a model once; does nothing when it is there. The only command that downloads."""
    from workbench.models.fetch import fetch
    from workbench.models.registry import origin

    with interruptible() as cancel, Meter(name) as meter:
        folder = fetch(name, meter, cancel.is_set)
    if json:
        print_json({"model": name, "folder": str(folder), "origin": origin(name)})
    else:
        print(f"{name} is ready: {folder}")


def lab(
    context: typer.Context,
    notebook: Annotated[str, typer.Option(help="Which notebook to open.")] = START,
    json: o.Json = False,
) -> None:
    """Open JupyterLab on your copies of the notebooks, in lab/; further arguments go to JupyterLab.

    What you edit stays. A notebook of your own is opened where it is.

    It listens on this machine only; its token and other protections stay on.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise MissingExtra("jupyterlab", "lab", "Opening the notebooks")
    path = own_copy(find_notebook(notebook))
    command = lab_command(path, context.args)
    if json:
        print_json({"notebook": str(path), "command": command})
    else:
        note(f"opening {path}; Ctrl-C twice stops the server")
    sys.stdout.flush()
    os.chdir(path.parent)
    os.execv(command[0], command)  # noqa: S606 - our own interpreter, so that Ctrl-C reaches the server itself


def find_notebook(name: str) -> Path:
    """The notebook of this checkout. Raises :class:`ModelNotFound` when there is none, as in a wheel."""
    from workbench.models.datadir import data_dir

    given, root = Path(name), data_dir().parent
    for path in (given, root / "notebooks" / name, root / "lab" / name, Path("notebooks") / name):
        if path.is_file():
            return path.resolve()
    raise ModelNotFound(
        f"There is no notebook {name!r} here.", hint="Notebooks come with a checkout: run from there."
    )


def own_copy(notebook: Path) -> Path:
    """The person's copy of a shipped notebook, made or brought up to date; any other notebook as it is."""
    from workbench.models.datadir import data_dir

    root = data_dir().parent
    if notebook.parent != root / "notebooks":
        return notebook
    own = root / "lab"
    try:
        for line in refresh(notebook.parent, own):
            note(line)
    except OSError as error:
        raise StorageError(
            f"Your copies of the notebooks cannot be kept in {own}: {error.strerror}.",
            hint=f"Copy {notebook} to a folder of yours and name it with --notebook.",
        ) from None
    return own / notebook.name


def lab_command(notebook: Path, extra: list[str]) -> list[str]:
    """How JupyterLab is started: bound to 127.0.0.1, token on; root, as in a container, must be allowed."""
    command = [sys.executable, "-m", "jupyterlab", notebook.name, "--ServerApp.ip=127.0.0.1"]
    # The address that JupyterLab prints leads to the notebook too, for a browser on another screen.
    command += [f"--LabApp.default_url=/lab/tree/{notebook.name}", "--LabApp.news_url=None"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return [*command, *extra]


def doctor(json: o.Json = False) -> None:
    """What this machine can run, what it cannot, and what to do about it (status 1 when nothing can run)."""
    from workbench.cli.doctor import render, report

    result = report()
    if json:
        print_json(result)
    else:
        render(result, out())
    raise typer.Exit(0 if result["ready"] else 1)
