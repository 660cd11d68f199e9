"""Notebooks run headless from top to bottom, are stored stripped, and come out as valid, shareable pages."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from workbench.models.convert import NOTE, VERSION
from workbench.spec.errors import OptionError
from workbench.widgets.notebook import injected, parameters

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = {"model", "device", "seed", "budget_s", "profile"}
#: What only one notebook takes, and a phrase that its exported page must show.
OWN = {"40_attention_kernels": {"kernel", "build", "gpu_report"}}
TOLD = {
    "00_start": "KV in use",
    "10_paged_kv": "found by radix tree",
    "11_kv_formats": "Bits per element",
    "12_kv_codecs": "tokens shuffled",
    "13_kv_selection": "heads agree",
    "20_speculation_law": "resample from p",
    "21_drafters": "tokens a forward",
    "22_eagle": "eagle3, shuffled",
    "23_mtp": "No: it has no module",
    "24_two_devices": "decoding goes on without drafts",
    "25_train_a_head": "the same bits",
    "26_early_exits": "tokens a pass (counted)",
    "40_attention_kernels": "running max m",
}
SMOKE = {"model": "tiny", "profile": "smoke", "budget_s": 5.0, "seed": 3}
#: Where it takes another model than tiny to show anything.
MODEL = {"23_mtp": "tiny-mtp", "26_early_exits": "tiny-exit"}


def tagged(nb: Any, tag: str) -> list[int]:
    return [i for i, c in enumerate(nb.cells) if tag in c.metadata.get("tags", [])]


@pytest.fixture(scope="session", params=NOTEBOOKS, ids=lambda p: p.stem)
def executed(request: Any, tmp_path_factory: pytest.TempPathFactory, kernels: Any) -> tuple[Path, Any]:
    """A notebook after papermill, as a file and as a node."""
    import papermill

    out = tmp_path_factory.mktemp("executed") / request.param.name
    given = {**SMOKE, "model": MODEL.get(request.param.stem, SMOKE["model"])}
    papermill.execute_notebook(
        str(request.param),
        str(out),
        parameters=given,
        cwd=str(request.param.parent),
        progress_bar=False,
        start_timeout=300,
        km=kernels(),
    )
    return out, nbformat.read(out, as_version=4)


# -- as stored ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_source_is_stripped_small_and_has_one_parameters_cell(path: Path) -> None:
    nb = nbformat.read(path, as_version=4)
    nbformat.validate(nb)
    assert path.stat().st_size <= 60_000
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in nb.cells)
    assert nb.metadata.kernelspec.name == "python3"
    assert "version" not in nb.metadata.get("language_info", {})
    (at,) = tagged(nb, "parameters")
    assert at == next(i for i, c in enumerate(nb.cells) if c.cell_type == "code")
    assert all(len(c.source.splitlines()) <= 15 for c in nb.cells if c.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_nbw_06_parameters_are_typed_literals_of_the_known_names(path: Path) -> None:
    nb = nbformat.read(path, as_version=4)
    body = ast.parse(nb.cells[tagged(nb, "parameters")[0]].source).body
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in body}  # type: ignore[attr-defined]
    assert set(values) == NAMES | OWN.get(path.stem, set())
    assert str(parameters(values, OWN.get(path.stem, ())))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_nbw_08_no_widget_metadata_is_stored(path: Path) -> None:
    assert "widgets" not in nbformat.read(path, as_version=4).metadata


# -- executed -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_and_shows_figures_and_a_result_table(executed: tuple[Path, Any]) -> None:
    path, nb = executed
    outputs = [o for c in nb.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    data = [o.data for o in outputs if "data" in o]
    assert sum("application/vnd.plotly.v1+json" in d for d in data) >= 2
    shown = "".join(d.get("text/plain", "") for c in (nb.cells[i] for i in tagged(nb, "result")) for d in
                    (o.data for o in c.outputs if "data" in o))  # fmt: skip
    assert "measured" in shown
    assert path.stat().st_size <= 3_000_000


@pytest.mark.slow
def test_nbw_06_injected_values_come_after_the_defaults_and_take_effect(executed: tuple[Path, Any]) -> None:
    path, nb = executed
    assert tagged(nb, "injected-parameters")[0] == tagged(nb, "parameters")[0] + 1
    echoed = "".join(o.get("text", "") for c in nb.cells if c.cell_type == "code" for o in c.outputs)
    model = MODEL.get(path.stem, SMOKE["model"])
    assert f"model={model} device=cpu seed=3 budget_s=5 profile=smoke" in echoed


@pytest.mark.slow
def test_nbw_08_executed_copies_are_valid_and_export_to_html(executed: tuple[Path, Any]) -> None:
    from nbconvert import HTMLExporter

    path, nb = executed
    nbformat.validate(nb)
    widgets = nb.metadata.get("widgets")
    if widgets is not None:
        state = widgets["application/vnd.jupyter.widget-state+json"]
        assert state["state"]
        assert {"version_major", "version_minor"} <= set(state)
    page, _ = HTMLExporter(require_js_url="", mathjax_url="").from_notebook_node(nb)
    assert TOLD[path.stem] in page
    for output in (o for c in nb.cells if c.cell_type == "code" for o in c.outputs if "data" in o):
        assert "NaN" not in json.dumps(output.data.get("application/vnd.plotly.v1+json", {}))


@pytest.mark.slow
def test_nbw_06_a_misspelt_parameter_fails_the_run(tmp_path: Path) -> None:
    import papermill

    nb = nbformat.read(NOTEBOOKS[0], as_version=4)
    stop = next(i for i, c in enumerate(nb.cells) if "parameters(globals())" in c.source)
    nb.cells = nb.cells[: stop + 1]
    nbformat.write(nb, tmp_path / "in.ipynb")
    with pytest.raises(papermill.PapermillExecutionError, match=r"no parameter 'modle'.*'model'"):
        papermill.execute_notebook(
            str(tmp_path / "in.ipynb"),
            str(tmp_path / "out.ipynb"),
            parameters={"modle": "tiny"},
            progress_bar=False,
        )


# -- the check itself ---------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"model": "tiny", "device": "cpu", "seed": 0, "budget_s": 60, "profile": "smoke"}


def test_nbw_06_names_are_read_from_papermills_own_cell() -> None:
    cells = ["", "model = 1\nother = 2", "# Parameters\nmodel = 'x'\nsmoke = True\n"]
    assert injected(cells) == ["model", "smoke"]
    with pytest.raises(OptionError, match="no parameter 'smoke'"):
        parameters({**GOOD, "In": cells})
    assert parameters({**GOOD, "In": cells[:2], "unrelated": 5}).smoke


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3),
        ("seed", True),
        ("seed", 1.5),
        ("seed", -1),
        ("budget_s", "60"),
        ("budget_s", 0),
        ("profile", "x"),
    ],
)
def test_nbw_06_bad_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError):
        parameters({**GOOD, name: value})


def test_nbw_06_a_notebook_may_have_text_parameters_of_its_own() -> None:
    given = {**GOOD, "gpu_report": "", "kernel": "fa3_fwd"}
    found = parameters(given, own=("kernel", "gpu_report"))
    assert dict(found.own) == {"kernel": "fa3_fwd", "gpu_report": ""}
    assert str(found).endswith("profile=smoke kernel=fa3_fwd")
    assert not parameters(given).own
    cells = ["# Parameters\ngpu_reprot = 'x'\n"]
    with pytest.raises(OptionError, match=r"no parameter 'gpu_reprot'.*'gpu_report'"):
        parameters({**given, "In": cells}, own=("kernel", "gpu_report"))
    with pytest.raises(OptionError, match="gpu_report = 3"):
        parameters({**given, "gpu_report": 3}, own=("gpu_report",))
    with pytest.raises(OptionError, match="parameters cell"):
        parameters(GOOD, own=("gpu_report",))


def test_nbw_06_a_missing_parameter_is_refused() -> None:
    with pytest.raises(OptionError, match="parameters cell"):
        parameters({k: v for k, v in GOOD.items() if k != "seed"})


@pytest.mark.parametrize("fetched", [True, False])
def test_without_a_name_the_model_is_the_real_one_where_it_is_there(
    fetched: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    if fetched:
        folder = tmp_path / "models" / "smollm2-135m"
        folder.mkdir(parents=True)
        (folder / NOTE).write_text(json.dumps({"version": VERSION}))
    found = parameters({**GOOD, "model": ""})
    assert found.model == ("smollm2-135m" if fetched else "tiny")
    assert ("workbench fetch smollm2-135m" in str(found)) is not fetched
    assert parameters({**GOOD, "model": "tiny"}).model == "tiny"
