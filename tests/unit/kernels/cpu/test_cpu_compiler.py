"""How the kernels are built: once, whole or not at all, with an error that says what the compiler said."""

from __future__ import annotations

import ctypes
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.kernels.cpu import compiler, library
from workbench.spec.errors import CompilerError

SMALL = 'extern "C" int answer() { return 42; }\n'

pytestmark = pytest.mark.skipif(
    not compiler.supported() or compiler.find() is None, reason="needs 64-bit Linux and a C++ compiler"
)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder of one small file in the place of the kernels'."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.cpp").write_text(SMALL)
    monkeypatch.setattr(compiler, "SOURCE", folder)
    return folder


def test_the_second_build_compiles_nothing(small: Path, tmp_path: Path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    made = compiler.build(cache)
    assert ctypes.CDLL(str(made)).answer() == 42
    monkeypatch.setattr(compiler, "_call", lambda command: pytest.fail("compiled again"))
    assert compiler.build(cache) == made
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == [made.name]


def test_source_flags_and_compiler_are_part_of_the_name(small: Path, monkeypatch) -> None:
    found = str(compiler.find())
    names = [compiler.key(found, ()), compiler.key(found, ("-O1",)), compiler.key("/other/compiler", ())]
    monkeypatch.setattr(compiler, "_processor", lambda: "another CPU")
    names.append(compiler.key(found, ()))
    (small / "one.cpp").write_text(SMALL.replace("42", "43"))
    names.append(compiler.key(found, ()))
    assert len(set(names)) == 5


def test_a_failed_compile_quotes_the_compiler_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    (small / "one.cpp").write_text("int broken( { not C++\n")
    with pytest.raises(CompilerError, match=r"could not compile.*\n(.*\n)*.*one\.cpp:1") as raised:
        compiler.build(tmp_path / "cache")
    assert "apt-get install g++" in raised.value.hint
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"] == []
    (small / "one.cpp").write_text(SMALL)  # mended, it builds
    assert compiler.build(tmp_path / "cache").is_file()


def test_what_an_ended_process_left_is_cleared_away(small: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / ".compile-ended"
    left.mkdir(parents=True)
    (left / "layer.cpp.o").write_bytes(b"half")
    compiler.build(tmp_path / "cache")
    assert not left.exists()


@pytest.mark.parametrize("damage", ["cut short", "lost pages", "empty", "of another release"])
def test_a_damaged_library_is_made_again(small: Path, tmp_path: Path, damage: str) -> None:
    """Loading it would not raise but end the process, and every later one."""
    made = compiler.build(tmp_path / "cache")
    data = made.read_bytes()
    assert compiler.whole(made)
    half = len(data) // 2
    left = {
        "cut short": data[:half],
        "lost pages": data[:half] + bytes(len(data) - half),
        "empty": b"",
        "of another release": data[:-32],
    }[damage]
    made.write_bytes(left)
    assert not compiler.whole(made)
    assert compiler.build(tmp_path / "cache") == made
    assert made.read_bytes() == data
    assert ctypes.CDLL(str(made)).answer() == 42


def test_no_compiler_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler.find() is None
    with pytest.raises(CompilerError, match="CXX names 'no-such-compiler'") as raised:
        compiler.build(tmp_path)
    assert "unset it" in raised.value.hint
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.raises(CompilerError, match="no C\\+\\+ compiler") as raised:
        compiler.build(tmp_path)
    assert "Install" in raised.value.hint


def test_a_compiler_that_hangs_is_ended(small: Path, tmp_path: Path, monkeypatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec sleep 60\n')
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compiler, "TIMEOUT", 0.5)
    with pytest.raises(CompilerError, match="did not finish") as raised:
        compiler.build(tmp_path / "cache")
    assert "Try again" in raised.value.hint


def test_a_folder_that_cannot_be_written_says_where_to_go(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompilerError) as raised:
        compiler.build(tmp_path / "file" / "cache")
    assert "WORKBENCH_CACHE" in raised.value.hint


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    with pytest.raises(CompilerError, match="cannot be loaded") as raised:
        library.load(damaged)
    assert str(damaged) in raised.value.hint


def test_two_processes_build_once(small: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from workbench.kernels.cpu import compiler\n"
        "compiler.SOURCE = Path(sys.argv[1])\n"
        "print(compiler.build(Path(sys.argv[2])).stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(small), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0] == said[1] != ""


def test_threads_are_torchs_own(compiled_kernels: ctypes.CDLL) -> None:
    """No second OpenMP runtime comes with the library, and no second pool of threads beside torch's."""
    code = """
import os, sys, torch
from pathlib import Path
from workbench.core.benchmark_openmp import loaded_runtimes
from workbench.kernels.cpu import library
from workbench.models.compiled import linear
torch.set_num_threads(2)
weight = torch.ones(512, 512)
weight @ weight
before = loaded_runtimes(), len(os.listdir("/proc/self/task"))
product = linear(library.load(Path(sys.argv[1])), weight, None, rounded=False)(weight)
print(before == (loaded_runtimes(), len(os.listdir("/proc/self/task"))), product.sum().item() == 512.0**3)
"""
    command = [sys.executable, "-c", code, compiled_kernels._name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "True"], done.stdout
