"""Kernels for notebooks, one ahead: it imports what every notebook does while the notebook before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
COMMON = "import workbench.core.session, workbench.widgets"


class Ahead:
    """A kernel of its own for every notebook, and the one after it."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.coming: Any = None

    def take(self) -> Any:
        """The manager of a kernel that no notebook has had; whoever takes it shuts it down."""
        taken = self.coming or self._begin()
        self.left -= 1
        self.coming = self._begin() if self.left > 0 else None
        return taken

    def _begin(self) -> Any:
        from jupyter_client.blocking import BlockingKernelClient
        from jupyter_client.manager import AsyncKernelManager
        from jupyter_core.utils import run_sync

        manager = AsyncKernelManager(kernel_name="python3")
        run_sync(manager.start_kernel)(cwd=str(FOLDER))
        client = BlockingKernelClient()
        client.load_connection_info(manager.get_connection_info())
        client.start_channels(stdin=False, hb=False)
        client.execute(COMMON, silent=True)  # counts as no cell, shows nothing; what comes next waits for it
        manager.first = client
        return manager


def end(manager: Any) -> None:
    """Stop a kernel."""
    from jupyter_core.utils import run_sync

    manager.first.stop_channels()
    run_sync(manager.shutdown_kernel)(now=True)


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """``kernels()`` gives a new kernel's manager: to be shut down here, at the latest at the end."""
    asked = {
        item.callspec.params["executed"]  # type: ignore[attr-defined]
        for item in request.session.items
        if "executed" in getattr(item, "fixturenames", ())
    }
    ahead, taken = Ahead(len(asked)), []

    def take() -> Any:
        if taken:
            end(taken.pop())
        taken.append(ahead.take())
        return taken[-1]

    yield take
    for manager in (*taken, ahead.coming):
        if manager is not None:
            end(manager)
