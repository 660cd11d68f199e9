"""Nothing in the tree runs code hidden in data: no pickles, no eval, no remote code, no injected markup."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("workbench", "kernels", "widgets", ".make", "notebooks")
PICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
}
MARKUP = re.compile(
    r"\.innerHTML|\.outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function\(|"
    r"(?:import|from|src=|href=|fetch\()\s*\(?[\"'`]https?://"
)


def python_sources() -> Iterator[tuple[str, str]]:
    """Name and text of every module, script and notebook code cell of the tree."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
                if cell["cell_type"] == "code":
                    lines = "".join(cell["source"]).splitlines()
                    code = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
                    yield f"{path.relative_to(ROOT)} cell {number}", code


def dangers(text: str) -> list[str]:
    """Every construct in a Python source that could run code from data, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        what = None
        match node:
            case ast.Import(names=names):
                what = next((n.name for n in names if n.name.split(".")[0] in PICKLING), None)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING:
                what = module
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                what = f"{name}()"
            case ast.Call(func=func) if ast.unparse(func) in CALLS:
                what = f"{ast.unparse(func)}()"
            case ast.keyword(arg="trust_remote_code") | ast.arg(arg="trust_remote_code"):
                what = "trust_remote_code"
            case ast.keyword(arg="shell" | "allow_pickle", value=ast.Constant(value=True)):
                what = f"{node.arg}=True"
        if what:
            found.append(f"{getattr(node, 'lineno', 0)}: {what}")
    return found


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "import numpy, dill",
        "from pickle import loads",
        "x = eval('1')",
        "exec(code)",
        "torch.load('x.pt', weights_only=True)",
        "torch.hub.load('a', 'b')",
        "AutoModel.from_pretrained(p, trust_remote_code=False)",
        "def load(p, trust_remote_code=False): pass",
        "np.load(p, allow_pickle=True)",
        "subprocess.run(c, shell=True)",
        "os.system('ls')",
    ],
)
def test_the_scan_finds_what_it_looks_for(bad: str) -> None:
    assert len(dangers(bad)) == 1


def test_the_scan_lets_ordinary_code_pass() -> None:
    assert (
        dangers("model.eval()\nre.compile('a')\ntorch.compile(f)\nnp.load(p)\nsubprocess.run(['ls'])") == []
    )


def test_no_source_runs_code_from_data() -> None:
    sources = list(python_sources())
    assert any(name.startswith("workbench/spec/") for name, _ in sources)
    found = [f"{name}:{danger}" for name, text in sources for danger in dangers(text)]
    assert found == []


@pytest.mark.parametrize(
    "bad",
    ["el.innerHTML = text", "new Function('a')", 'import * as d3 from "https://cdn/x"', "fetch('http://a')"],
)
def test_the_markup_scan_finds_what_it_looks_for(bad: str) -> None:
    assert MARKUP.search(bad)


def test_front_end_code_injects_no_markup_and_loads_nothing_from_outside() -> None:
    assert not MARKUP.search("el.textContent = text; createElementNS('http://www.w3.org/2000/svg', 'g')")
    scripts = [p for p in (ROOT / "widgets").rglob("*") if p.suffix in {".js", ".mjs", ".css", ".py"}]
    assert scripts
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in scripts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MARKUP.search(line)
    ]
    assert found == []


def test_no_server_is_opened_to_others() -> None:
    """JupyterLab and our own server keep token, XSRF check and the loopback address."""
    opened = re.compile(r"0\.0\.0\.0|token=['\"]{2}|disable_check_xsrf|allow_origin=|allow_remote_access")
    files = [ROOT / "Makefile", *(ROOT / "workbench").rglob("*.py"), *(ROOT / ".make").glob("*")]
    found = [str(p.relative_to(ROOT)) for p in files if p.is_file() and opened.search(p.read_text("utf-8"))]
    assert found == []
