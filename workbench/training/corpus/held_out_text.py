"""The shipped evaluation text: passages of held-out documents, and its manifest.

``eval.txt`` is one file, so that any tool can read it; the manifest says which byte range
came from which document and under which terms, so that scores can be split by source.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from workbench.training.corpus.sources import Document, Source

BYTES_PER_SOURCE = {"docs": 80_000, "stdlib": 80_000, "plays": 80_000, "jargon": 50_000}
"""Upper limits; together below 300 kB."""


def write_eval_text(folder: Path, documents: list[Document], sources: tuple[Source, ...]) -> None:
    """Write ``eval.txt`` and ``MANIFEST.json`` from the held-out documents."""
    parts: list[dict[str, object]] = []
    text = b""
    for source, limit in BYTES_PER_SOURCE.items():
        held = [document for document in documents if document.held_out and document.source == source]
        share = limit // max(1, len(held))
        for document in held:
            passage = _head(document.text, share).encode()
            parts.append({"document": document.name, "start": len(text), "bytes": len(passage)})
            text += passage
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.txt").write_bytes(text)
    manifest = {
        "file": "eval.txt",
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
        "use": "evaluation only: no shipped model was trained on any of these documents",
        "sources": [asdict(source) for source in sources],
        "parts": parts,
    }
    (folder / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _head(text: str, limit: int) -> str:
    """At most ``limit`` bytes, cut at the end of a paragraph, ending in one blank line."""
    cut = text.encode()[:limit].decode("utf-8", errors="ignore")
    if len(cut) < len(text):
        cut = cut[: cut.rfind("\n\n")]
    return cut.strip("\n") + "\n\n"
