"""The compiler driver: what compiles, what does not, what aborts, and that a negative control trips."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.kernels.aot import BLACKWELL, Compiled, Request, compile_builds
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import CompilerError

SOURCE = """
import os
import triton
import triton.language as tl
from workbench.kernels.spec import Bound, Build, Cost, Kernel


@triton.jit
def product(a, b, c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr):
    i, j, k = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(STEPS):
        x = tl.load(a + i * (BK * STEPS) + step * BK + k[None, :])
        y = tl.load(b + j * (BK * STEPS) + step * BK + k[:, None])
        acc = tl.dot(x, y, acc)
    tl.store(c + i * BN + j, acc)


SIGNATURE = {"a": "*bf16", "b": "*bf16", "c": "*fp32"}


def build(name, bm, bn, bk, **options):
    constants = {"BM": bm, "BN": bn, "BK": bk, "STEPS": 8}
    return Build(name, SIGNATURE, constants, aligned=("a", "b", "c"), **options)


BUILDS = (
    build("fits", 64, 64, 64, sass={"HGMMA": Bound(1), "HMMA": Bound(0, 0), "spills": Bound(0, 0)}),
    build("too wide", 128, 256, 64, sass={"spills": Bound(0, 0)}, fails=True),
    build("too deep", 128, 128, 128, num_stages=5, fails=True),
    Build("untyped", {"a": "*bf16"}, {}, fails=True),
)
KERNEL = Kernel("product", "a product", "triton", "test", product, BUILDS, lambda **_: Cost(0, 0))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    file = tmp_path_factory.mktemp("aot") / "product_kernel.py"
    file.write_text(SOURCE)
    builds = [Build(n, {}, {}) for n in ("fits", "too wide", "too deep", "untyped")]
    kernel = Kernel("product", "", "triton", "", None, (), lambda **_: Cost(0, 0))
    wanted = [Request(str(file), kernel, b) for b in builds]
    wanted.append(Request(str(file), kernel, builds[0], BLACKWELL))
    found = compile_builds(wanted, jobs=2)
    return dict(zip(("fits", "too wide", "too deep", "untyped", "blackwell"), found, strict=True))


def test_a_fitting_product_becomes_warpgroup_instructions(results: dict[str, Compiled]) -> None:
    found = results["fits"]
    assert found.facts is not None, found.error
    assert found.facts.value("HGMMA") >= 4
    assert found.facts.value("spills") == 0
    assert "HGMMA" in Path(found.sass).read_text()
    assert found.broken() == []


def test_blackwell_code_uses_its_own_instructions(results: dict[str, Compiled]) -> None:
    found = results["blackwell"]
    assert found.facts is not None, found.error
    assert found.facts.value("UTCHMMA") > 0
    assert found.facts.value("HGMMA") == 0


def test_too_much_shared_memory_is_seen_though_it_compiles(results: dict[str, Compiled]) -> None:
    found = results["too deep"]
    assert found.facts is not None, found.error
    assert any(line.startswith("smem is ") for line in found.broken())


def test_a_tile_beyond_the_registers_trips_its_bounds(results: dict[str, Compiled]) -> None:
    found = results["too wide"]
    assert found.facts is not None, found.error
    bounded = Build("too wide", {}, {}, sass={"spills": Bound(0, 0)})
    assert found.facts.broken(bounded)


def test_arguments_without_a_type_are_named(results: dict[str, Compiled]) -> None:
    assert results["untyped"].facts is None
    assert "without a type: ['BK'" in results["untyped"].error
    assert results["untyped"].broken()[0].startswith("does not compile")


def test_a_second_run_comes_from_the_cache(results: dict[str, Compiled]) -> None:
    again = compile_builds([results["fits"].request])[0]
    assert again.cached
    assert again.facts == results["fits"].facts


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_only(
    results: dict[str, Compiled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, facts = results["fits"].request, results["fits"].facts
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    assert not compile_builds([request])[0].cached
    (known,) = tmp_path.glob("kernels/*.json")
    for damage in ("", "{", "[]", "{}"):
        known.write_text(damage)
        again = compile_builds([request])[0]
        assert not again.cached and again.facts == facts, again.error
    assert compile_builds([request])[0].cached
    monkeypatch.setenv("WORKBENCH_CACHE", str(known))  # a file where the folder would be
    found = compile_builds([request])[0]
    assert found.facts == facts and not found.cached, found.error
    assert "HGMMA" in Path(found.sass).read_text()


def test_a_compiler_that_dies_is_that_build_s_error(tmp_path: Path) -> None:
    deadly = tmp_path / "deadly.py"
    deadly.write_text("import os\nos.abort()\n")
    kernel = Kernel("x", "", "triton", "", None, (), lambda **_: Cost(0, 0))
    found = compile_builds([Request(str(deadly), kernel, Build("b", {}, {}))])
    assert "ended with status" in found[0].error


def test_a_folder_without_triton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match="holds no triton"):
        compile_builds([], triton=tmp_path)
