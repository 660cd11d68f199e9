"""Where the shipped data lives: ``workbench/_data`` in an installed wheel, ``data/`` in a checkout."""

from __future__ import annotations

from pathlib import Path

import workbench
from workbench.spec.errors import ModelNotFound


def data_dir() -> Path:
    """The folder that holds ``models.toml`` and the shipped models; raises ``ModelNotFound`` without one."""
    # A package that is still a namespace has no __file__, but always a __path__.
    package = Path(next(iter(workbench.__path__))).resolve()
    for candidate in (package / "_data", package.parent / "data"):
        if candidate.is_dir():
            return candidate.resolve()
    raise ModelNotFound(
        f"No data folder beside the package {package}.",
        hint="Reinstall inference-workbench, or run from a full checkout.",
    )
