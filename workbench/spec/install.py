"""How an optional part is installed: the line that every message about a missing one shows."""

from __future__ import annotations

from pathlib import Path

NAME = "inference-workbench"
ROOT = Path(__file__).resolve().parents[2]


def install_line(extra: str = "") -> str:
    """``pip install …`` with an extra: of this checkout, where there is one, else of the distribution."""
    what = f"[{extra}]" if extra else ""
    return (
        f"pip install -e '.{what}'" if (ROOT / "pyproject.toml").is_file() else f"pip install '{NAME}{what}'"
    )
