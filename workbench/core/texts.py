"""The shipped text, cut in two: what quality is measured on, and what techniques are calibrated on.

Documents, not pages, are kept apart: every fifth of ``data/text/eval.txt`` is for calibration. No shipped
model was trained on any of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from workbench.models.datadir import data_dir
from workbench.spec.errors import RequestError

Use = Literal["evaluation", "calibration"]
_EVERY = 5


@dataclass(frozen=True)
class Document:
    """One document; the first part of its name is its source, e.g. ``stdlib/bisect.py``."""

    name: str
    text: str
    use: Use


def shipped_text(use: Use) -> str:
    """All documents of one use, one after the other; raises :class:`RequestError` for a damaged file."""
    return "".join(d.text for d in shipped_documents() if d.use == use)


def shipped_documents() -> tuple[Document, ...]:
    """All documents in order; raises :class:`RequestError` for a damaged file."""
    folder = data_dir() / "text"
    try:
        raw = (folder / "eval.txt").read_bytes()
        parts = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))["parts"]
        return tuple(
            Document(
                str(p["document"]),
                raw[p["start"] : p["start"] + p["bytes"]].decode(),
                "calibration" if i % _EVERY == _EVERY - 1 else "evaluation",
            )
            for i, p in enumerate(parts)
        )
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise RequestError(
            f"The shipped text in {folder} cannot be read: {err}.", hint="Reinstall, or give a text."
        ) from None
