"""The tree names no developer machine and no package index, holds no secret and nothing too big to review."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".toml", ".ipynb", ".yml", ".yaml", ".sh", ".js", ".css", ".cfg", ""}
MACHINE_PATH = re.compile(r"(?<![\w.~:/)}])/(?:work|home|root|Users|farm|mnt|tmp)/\w")
INDEX = re.compile(r"pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org")
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9]{32,}|\bgh[pous]_[A-Za-z0-9]{30,}|BEGIN [A-Z ]*PRIVATE KEY"
)
LARGEST, LARGEST_HEAD = 10_000_000, 25_000_000  # bytes of one file: of a model, of a draft head


def tree() -> list[Path]:
    """Files under version control, or every file of an unpacked source distribution."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return [p for p in ROOT.rglob("*") if p.is_file() and not {".venv", ".git"} & set(p.parts)]
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    """Our own text files: code, documents, configuration. Shipped corpora quote paths of all kinds."""
    files = [p for p in tree() if p.suffix in TEXT and p != Path(__file__).resolve()]
    return [(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8")) for p in files]


def hits(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open('/home/ann/x')", True),
        ("see /tmp/brief", True),
        ("cd /root/x", True),
        ("https://a.org/home/page", False),
        ("~/work/x", False),
        ("a/work/b", False),
        ("/proc/cpuinfo", False),
        ("/usr/bin/chromium", False),
    ],
)
def test_the_pattern_finds_machine_paths_only(line: str, found: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) == found


def test_no_machine_path_is_committed() -> None:
    assert hits(MACHINE_PATH) == []


def test_no_package_index_is_named() -> None:
    assert hits(INDEX) == []


def test_no_secret_is_committed() -> None:
    assert SECRET.search("hf_" + "a" * 34)
    assert hits(SECRET) == []


def test_files_are_small_enough_to_clone() -> None:
    files = tree()
    assert files
    heads = ROOT / "data" / "heads"
    big = {
        str(p.relative_to(ROOT)): p.stat().st_size
        for p in files
        if p.stat().st_size > (LARGEST_HEAD if heads in p.parents else LARGEST)
    }
    assert big == {}


def test_nothing_executable_or_pickled_is_committed() -> None:
    refused = {
        ".pkl",
        ".pickle",
        ".pt",
        ".pth",
        ".bin",
        ".ckpt",
        ".npy",
        ".npz",
        ".so",
        ".pyc",
        ".whl",
        ".db",
    }
    assert [str(p.relative_to(ROOT)) for p in tree() if p.suffix in refused] == []
