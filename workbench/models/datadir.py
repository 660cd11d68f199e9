"""Where the shipped data lives: ``workbench/_data``, files in a wheel, a link to ``data/`` in a checkout."""

from __future__ import annotations

from pathlib import Path

from workbench.spec.errors import ModelNotFound


def data_dir() -> Path:
    """The folder that holds ``models.toml`` and the shipped models; raises ``ModelNotFound`` without one."""
    package = Path(__file__).resolve().parents[1]  # by place: the root package is above this level
    for candidate in (package / "_data", package.parent / "data"):
        if candidate.is_dir():
            return candidate.resolve()
    raise ModelNotFound(
        f"No data folder beside the package {package}.",
        hint="Reinstall inference-workbench, or run from a full checkout.",
    )
