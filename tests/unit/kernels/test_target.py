"""What the machine offers to kernels, found without importing triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.kernels import target
from workbench.kernels.target import Target


def test_versions_are_compared_as_numbers() -> None:
    assert [target.in_range(v) for v in ("3.5.1", "3.6.0", "3.9.0+git", "3.10.0", "", "x.y")] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_shared_memory_follows_the_capability() -> None:
    def smem(capability: tuple[int, int] | None) -> int:
        return Target("cuda", "", capability, "", False).smem

    assert (smem((9, 0)), smem((8, 9)), smem((3, 0)), smem(None)) == (232_448, 101_376, 49_152, 0)


def test_another_triton_is_found_where_it_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_TRITON_360", raising=False)
    assert target.other_triton("3.6.0", tmp_path) is None
    for folder in (tmp_path / "triton-3.6.0", tmp_path / "elsewhere"):
        (folder / "triton").mkdir(parents=True)
        (folder / "triton" / "__init__.py").touch()
    assert target.other_triton("3.6.0", tmp_path) == tmp_path / "triton-3.6.0"
    monkeypatch.setenv("WORKBENCH_TRITON_360", str(tmp_path / "elsewhere"))
    assert target.other_triton("3.6.0", tmp_path) == tmp_path / "elsewhere"


def test_listing_and_probing_load_neither_triton_nor_a_driver() -> None:
    code = (
        "import sys; from workbench.kernels import names, target; names(); target.probe();"
        "import workbench.kernels.aot, workbench.kernels.sass;"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] == 'triton'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
