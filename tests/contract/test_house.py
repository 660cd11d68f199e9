"""The rules of the house that no linter knows: small files, typed errors, documented names, import names.

The rules apply to the package, that is workbench/, kernels/ and widgets/. Each scan first shows on a bad
example that it can fail.
"""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import importlib.util
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("workbench", "kernels", "widgets")
HARD_LIMIT, P90_LIMIT, MEDIAN_LIMIT = 400, 250, 110
FAMILIES = ("attention", "kv", "speculative", "quant", "moe", "depth", "grammar")
UNFINISHED = re.compile(r"raise NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")


def sources(suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """The package's own files; links below workbench/ are not followed twice."""
    found = [p for folder in PACKAGE for p in sorted((ROOT / folder).rglob("*")) if p.suffix in suffixes]
    unique = {path.resolve(): path for path in found if "_data" not in path.parts}
    return list(unique.values())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def asserts(tree: ast.Module) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, bool]]:
    """Public functions, classes and methods as (name, node, is a method)."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node.name, node, False
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, kinds) and not member.name.startswith("_"):
                        yield f"{node.name}.{member.name}", member, True


def undocumented(tree: ast.Module, promised: frozenset[str]) -> list[str]:
    """Public names without a docstring; a method whose promise a seam documents need not repeat it."""
    return [
        name
        for name, node, is_method in public_definitions(tree)
        if not ast.get_docstring(node)  # type: ignore[arg-type]
        and not (is_method and name.rpartition(".")[2] in promised)
        and not _is_overload_or_setter(node)
    ]


def _is_overload_or_setter(node: ast.AST) -> bool:
    decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(d == "overload" or d.endswith(".setter") for d in decorators)


def promised_methods() -> frozenset[str]:
    """Methods that a Protocol anywhere in the package declares and documents."""
    names = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(b) for b in node.bases):
                names |= {
                    m.name for m in node.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)
                }
    return frozenset(names)


def eager_imports(tree: ast.Module) -> set[str]:
    """Top-level names imported when the module is: not inside functions, try blocks or type checking."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def is_kernel_file(path: Path) -> bool:
    """Whether a file lies in a folder of kernels or in their emulator; kernels/ itself imports no triton."""
    parts = path.relative_to(ROOT).parts
    return parts[0] == "kernels" and len(parts) > 2 and parts[1] != "layouts"


def imported_names(tree: ast.Module) -> set[str]:
    """Every dotted name an import anywhere in the module may load, with its parent packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {
        ".".join(parts[:end]) for parts in (n.split(".") for n in names) for end in range(1, len(parts) + 1)
    }


def test_every_file_is_small() -> None:
    lengths = {name_of(p): len(p.read_text("utf-8").splitlines()) for p in sources((".py", ".js", ".css"))}
    assert lengths
    assert {name: n for name, n in lengths.items() if n > HARD_LIMIT} == {}


def test_most_files_are_smaller() -> None:
    lengths = [len(p.read_text("utf-8").splitlines()) for p in sources()]
    assert statistics.median(lengths) <= MEDIAN_LIMIT
    assert statistics.quantiles(lengths, n=10)[-1] <= P90_LIMIT


def test_no_assert_validates_anything_in_the_package() -> None:
    assert asserts(ast.parse("def f(x):\n    assert x\n")) == [2]
    found = {name_of(p): lines for p in sources() if (lines := asserts(ast.parse(p.read_text("utf-8"))))}
    assert found == {}


def test_nothing_is_left_unfinished() -> None:
    assert UNFINISHED.search("raise NotImplementedError")
    found = [
        f"{name_of(path)}:{number}"
        for path in sources((".py", ".js"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_every_module_says_what_it_is() -> None:
    assert [name_of(p) for p in sources() if not ast.get_docstring(ast.parse(p.read_text("utf-8")))] == []


def test_every_public_name_is_documented() -> None:
    bad = ast.parse("class A:\n    'Doc.'\n    def run(self): ...\n    def kept(self): ...\n")
    assert undocumented(bad, frozenset({"kept"})) == ["A.run"]
    promised = promised_methods()
    found = [
        f"{name_of(path)}: {name}"
        for path in sources()
        for name in undocumented(ast.parse(path.read_text("utf-8")), promised)
    ]
    assert found == []


def test_optional_packages_are_imported_only_when_used() -> None:
    """A missing extra greys out a technique; it never breaks an import. Widgets may draw, once imported.

    Kernel files need triton to be written at all; they are imported by name, when asked for.
    """
    assert eager_imports(ast.parse("import zstandard.x\ndef f():\n    import gguf\n")) == {"zstandard"}
    declared = [Requirement(line) for line in metadata.requires("inference-workbench") or ()]
    core = {r.name for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})}
    providers = metadata.packages_distributions()
    allowed = {*sys.stdlib_module_names, "workbench"}
    allowed |= {module for module, owners in providers.items() if core & set(owners)}
    found = [
        f"{name_of(path)}: {module}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] != "widgets"
        for module in sorted(eager_imports(ast.parse(path.read_text("utf-8"))) - allowed)
        if not (module == "triton" and is_kernel_file(path))
    ]
    assert found == []


def test_widgets_never_import_a_technique() -> None:
    """Views are derived from specs and events; what a family computes for all its techniques may be used."""
    bad = ast.parse("def f():\n    from workbench.kv import kivi\n    import workbench.quant.awq.fit\n")
    assert imported_names(bad) >= {"workbench.kv.kivi", "workbench.quant.awq"}
    techniques = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if re.search(r"^SPEC\b.*=", path.read_text("utf-8"), re.MULTILINE)
    }
    assert any(name.split(".")[1] in FAMILIES for name in techniques)
    found = {
        f"{name_of(path)}: {name}"
        for path in (ROOT / "widgets").rglob("*.py")
        for name in imported_names(ast.parse(path.read_text("utf-8"))) & techniques
    }
    assert found == set()


def test_kernels_and_widgets_are_ours_only_under_workbench() -> None:
    import workbench.kernels
    import workbench.widgets

    assert Path(workbench.kernels.__file__).resolve() == ROOT / "kernels" / "__init__.py"
    assert Path(workbench.widgets.__file__).resolve() == ROOT / "widgets" / "__init__.py"
    assert not hasattr(workbench.kernels, "__version__")  # transformers reads one as the hub client's
    for name in ("kernels", "widgets"):
        spec = importlib.util.find_spec(name)
        assert spec is None or not str(spec.origin).startswith(str(ROOT)), name


@pytest.mark.parametrize("where", ["notebooks", "tests"])
def test_a_kernel_started_in_a_folder_of_the_tree_is_not_shadowed(where: str) -> None:
    code = (
        "import importlib.util as u, workbench.kernels;"
        "found = u.find_spec('kernels'); print(found.origin if found else 'absent')"
    )
    folder = ROOT / where
    if not folder.is_dir():
        pytest.skip(f"{where}/ is not in this tree")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert str(ROOT / "kernels") not in done.stdout


def test_importing_the_workbench_and_its_specs_loads_no_torch() -> None:
    code = "import sys, workbench.spec.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests").returncode == 0
