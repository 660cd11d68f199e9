"""A JupyterLab of one's own and a browser on it. Pictures are kept in reports/ui, outside version control."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
    "@jupyterlab/apputils-extension:themes": {"theme": "JupyterLab Light"},
    # A test leaves no autosave behind and is asked nothing.
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


NOT_OURS = ("Failed to load resource", "widget model not found", "[anywidget] Failed to initialize model")
"""What JupyterLab says on its own: look-ups that fail, that its widget manager asked for a model before the
kernel had told of it, which happens on a busy machine and is asked again, and that a script took two seconds
to load, after which a panel still hears (``static/hearing.js``)."""


def own(text: str) -> bool:
    """Whether a console error is the workbench's."""
    return not any(other in text for other in NOT_OURS)


@pytest.fixture(scope="session")
def shots() -> Path:
    folder = ROOT / "reports" / "ui"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and root folder of a running JupyterLab."""
    base = tmp_path_factory.mktemp("lab")
    work, app = base / "work", base / "settings"
    work.mkdir()
    app.mkdir()
    (app / "overrides.json").write_text(json.dumps(SETTINGS))
    port = free_port()
    env = {**os.environ, "JUPYTER_CONFIG_DIR": str(base / "config"), "JUPYTER_DATA_DIR": str(base / "data")}
    env |= {
        "JUPYTER_RUNTIME_DIR": str(base / "runtime"),
        "IPYTHONDIR": str(base / "ipython"),
        "HOME": str(base),
    }
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(base / "user"), "JUPYTERLAB_WORKSPACES_DIR": str(base / "spaces")}
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--IdentityProvider.token=test", f"--ServerApp.root_dir={work}", "--LabApp.news_url=None"]
    command += [f"--LabServerApp.app_settings_dir={app}", f"--LabApp.app_settings_dir={app}"]
    command += ["--allow-root"] if os.getuid() == 0 else []
    log = (base / "lab.log").open("wb")
    process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/api?token=test", timeout=5).read()  # noqa: S310
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    pytest.fail(f"JupyterLab did not start:\n{(base / 'lab.log').read_text()[-3000:]}")
                time.sleep(0.5)
        yield address, work
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_notebook(lab: tuple[str, Path], browser: Any) -> Iterator[Callable[..., Any]]:
    """``open_notebook(*cells)`` opens them in a page, runs them all, and returns the page.

    ``script`` runs in the page before anything of JupyterLab does.
    """
    address, work = lab
    contexts = []

    def open_(*cells: str, width: int = 1440, height: int = 1100, script: str = "") -> Any:
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        nb.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        name = f"t{len(list(work.iterdir()))}.ipynb"
        nbformat.write(nb, work / name)
        context = browser.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(script)
        page.errors = []

        def heard(text: str) -> None:
            if own(text):
                page.errors.append(text)

        page.on("console", lambda m: heard(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: heard(str(e)))
        page.goto(f"{address}/doc/tree/{name}?token=test")
        page.wait_for_selector(".jp-Notebook", timeout=120_000)
        page.get_by_text("| Idle").wait_for(timeout=120_000)  # before, JupyterLab asks for a kernel
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        return page

    yield open_
    for context in contexts:
        context.close()
