"""A person's own copies of the shipped notebooks: JupyterLab saves by itself, the checkout stays as it is.

A copy is made once and then belongs to the person. When a shipped notebook changes, a copy in which no cell
was edited is replaced; an edited one is kept beside the new one, under a name with the date.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from datetime import date
from itertools import count
from pathlib import Path

RECORD = ".shipped.json"
"""Which version of each shipped notebook its copy was made from, by the hash of its cells."""


def refresh(shipped: Path, own: Path) -> list[str]:
    """Bring the copies in ``own`` up to date with the notebooks in ``shipped``; returns what to tell."""
    own.mkdir(parents=True, exist_ok=True)
    record, told = _read(own / RECORD), []
    for source in sorted(shipped.glob("*.ipynb")):
        copy, now = own / source.name, cells_hash(source)
        if copy.exists() and now not in (record.get(source.name), cells_hash(copy)):
            if cells_hash(copy) == record.get(source.name):
                told.append(f"{copy.name} was updated")
            else:
                kept = _free_name(copy)
                copy.rename(kept)
                told.append(f"{copy.name} is new; the one you edited is now {kept.name!r}")
            _place(source, copy)
        elif not copy.exists():
            _place(source, copy)
        record[source.name] = now
    (own / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return told


def cells_hash(notebook: Path) -> str:
    """Digest of kind and source of every cell: outputs and counters are no edits. Empty if unreadable."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        text = json.dumps([[c["cell_type"], "".join(c["source"])] for c in cells])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _place(source: Path, copy: Path) -> None:
    """A whole copy or none: an interrupt leaves no half of a notebook under the name."""
    beside = copy.with_name(f".{copy.name}.new")
    shutil.copyfile(source, beside)
    beside.replace(copy)


def _free_name(copy: Path) -> Path:
    """The name that an edited copy is kept under; one that is free."""
    stem, names = f"{copy.stem} (edited, {date.today().isoformat()}", count(2)
    name = copy.with_name(f"{stem}){copy.suffix}")
    while name.exists():
        name = copy.with_name(f"{stem} {next(names)}){copy.suffix}")
    return name


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: str(v) for k, v in found.items()} if isinstance(found, dict) else {}
