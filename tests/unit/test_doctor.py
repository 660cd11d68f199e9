"""The doctor's probes: each state is reached, and a state that is not ok says what follows and what helps."""

from __future__ import annotations

import importlib.metadata as metadata
import io
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console

from workbench.cli import doctor, probe_hardware, probe_software
from workbench.cli.finding import Finding
from workbench.core import room
from workbench.kernels.cpu import compiler
from workbench.models.registry import registry
from workbench.spec import install

ZEN4 = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\nflags\t\t: ignored amx_bf16\n"


def use_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Pretend that the named packages are installed in these versions; None means absent."""
    real = probe_software.installed

    def pretend(package: str) -> Version | None:
        key = package.replace("-", "_")
        if key in versions:
            return Version(versions[key]) if versions[key] else None
        return real(package)

    monkeypatch.setattr(probe_software, "installed", pretend)


def not_installed(_: str) -> Any:
    raise metadata.PackageNotFoundError("inference-workbench")


def test_report_is_json_and_every_problem_has_a_consequence_and_a_remedy() -> None:
    result = doctor.report()
    assert json.loads(json.dumps(result)) == result
    names = [row["name"] for row in result["findings"]]
    assert len(names) == len(set(names))
    assert {
        "python",
        "packages",
        "cores",
        "instruction sets",
        "memory",
        "disk",
        "gpu",
        "triton",
        "C++ compiler",
    } <= set(names)
    assert {f"extra {extra}" for extra in probe_software.EXTRAS} <= set(names)
    for row in result["findings"]:
        assert row["found"], row
        assert (row["status"] == "ok") == (not row["consequence"] and not row["remedy"]), row


def test_ready_falls_only_with_something_essential(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = Finding("browser", "missing", "none", "skips", "install")
    monkeypatch.setattr(doctor, "findings", lambda: [optional])
    assert doctor.report()["ready"]
    broken = Finding("torch", "missing", "none", "nothing runs", "make setup", essential=True)
    monkeypatch.setattr(doctor, "findings", lambda: [optional, broken])
    assert not doctor.report()["ready"]
    assert doctor.main(["--json"]) == 1


def test_json_form_prints_one_object_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: [Finding("python", "ok", "3.12", essential=True)])
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["found"] == "3.12"


def test_table_shows_remedies_literally() -> None:
    row = Finding("extra lab", "missing", "absent", "No notebooks.", "pip install 'inference-workbench[lab]'")
    out = io.StringIO()
    doctor.render({"ready": True, "findings": [row.to_dict()]}, Console(file=out, width=200))
    assert "inference-workbench[lab]" in out.getvalue()  # rich would swallow [lab] as markup
    assert "No notebooks." in out.getvalue()


def test_extras_are_those_of_the_distribution() -> None:
    declared = set(metadata.metadata(probe_software.DISTRIBUTION).get_all("Provides-Extra") or ())
    assert declared == set(probe_software.EXTRAS)
    for extra in declared:
        assert probe_software.requirements(extra) or extra == "gpu"
        assert not {r.name for r in probe_software.requirements(extra)} & {"torch", "transformers"}
    assert "torch" in {r.name for r in probe_software.requirements()}


@pytest.mark.parametrize(
    ("version", "problem"), [(None, "torch absent"), ("2.9.1", "torch 2.9.1 is outside"), ("2.13.0+cpu", "")]
)
def test_unmet_names_absent_and_wrong_versions(
    monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str
) -> None:
    use_versions(monkeypatch, torch=version)
    found = probe_software.unmet([Requirement("torch>=2.11,<2.14")])
    assert (found == []) if not problem else found[0].startswith(problem)


def test_core_packages_of_the_wrong_version_are_essential(monkeypatch: pytest.MonkeyPatch) -> None:
    use_versions(monkeypatch, transformers="4.57.0")
    finding = probe_software.probe_core()
    assert finding.status == "missing" and finding.essential and "4.57.0" in finding.found


def test_partly_installed_extra_is_limited_and_carries_the_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_versions(monkeypatch, papermill=None)
    lab = {f.name: f for f in probe_software.probe_extras()}["extra lab"]
    assert lab.status == "limited" and lab.found == "papermill absent"
    assert lab.remedy == "pip install -e '.[lab]'"


def test_away_from_a_checkout_the_distribution_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert probe_software.probe_triton(gpu=True).remedy in ("", "pip install -e '.[gpu]'")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    assert install.install_line("gpu") == "pip install 'inference-workbench[gpu]'"
    assert install.install_line() == "pip install 'inference-workbench'"


def test_every_model_of_the_registry_is_looked_for() -> None:
    rows = {f.name: f for f in doctor.findings() if f.name.startswith("model ")}
    assert list(rows) == [f"model {name}" for name in registry()]
    assert rows["model tiny"].essential and not rows["model gemma3-270m"].essential
    for name in registry():
        assert (
            rows[f"model {name}"].status == "ok" or f"workbench fetch {name}" in rows[f"model {name}"].remedy
        )


def test_uninstalled_workbench_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", not_installed)
    monkeypatch.setattr(metadata, "metadata", not_installed)
    assert probe_software.probe_python().status == "ok"
    assert probe_software.probe_core().status == "missing"
    assert {f.status for f in probe_software.probe_extras()} == {"missing"}


def test_unsupported_python_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_software.platform, "python_version", lambda: "3.10.4")
    assert probe_software.probe_python().status == "missing"


@pytest.mark.parametrize(
    ("lab", "kernel", "status"),
    [
        ("4.6.6", "7.4.0", "ok"),
        ("4.6.6", "6.30.0", "limited"),
        ("4.3.0", "7.4.0", "limited"),
        (None, "7", "missing"),
    ],
)
def test_live_controls_need_subshells(
    monkeypatch: pytest.MonkeyPatch, lab: str | None, kernel: str, status: str
) -> None:
    use_versions(monkeypatch, jupyterlab=lab, ipykernel=kernel)
    assert probe_software.probe_notebooks().status == status


@pytest.mark.parametrize(
    ("version", "gpu", "status"),
    [(None, False, "missing"), (None, True, "missing"), ("3.8.0", False, "limited"), ("3.8.0", True, "ok")],
)
def test_triton_states(monkeypatch: pytest.MonkeyPatch, version: str | None, gpu: bool, status: str) -> None:
    use_versions(monkeypatch, triton=version)
    assert probe_software.probe_triton(gpu).status == status


def test_browser_found_and_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_software.shutil, "which", lambda name: None)
    assert probe_software.probe_browser().status == "missing"
    monkeypatch.setattr(
        probe_software.shutil, "which", lambda name: "/bin/x" if name == "google-chrome" else None
    )
    assert probe_software.probe_browser() == Finding("browser", "ok", "/bin/x")


def test_the_compiler_is_found_or_its_loss_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported", lambda: True)
    monkeypatch.setattr(compiler, "find", lambda: "/bin/c++")
    assert probe_software.probe_compiler() == Finding("C++ compiler", "ok", "/bin/c++")
    monkeypatch.setattr(compiler, "find", lambda: None)
    lost = probe_software.probe_compiler()
    assert lost.status == "missing" and "compiled" in lost.consequence and "g++" in lost.remedy
    monkeypatch.setattr(compiler, "supported", lambda: False)
    assert "Linux" in probe_software.probe_compiler().remedy


def test_unknown_model_names_the_way_out() -> None:
    finding = probe_software.probe_model("no-such-model")
    assert finding.status == "missing" and "no-such-model" in finding.found and finding.remedy


def test_instruction_sets_of_the_first_processor_only() -> None:
    assert probe_hardware.instruction_sets(ZEN4) == ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]
    assert probe_hardware.instruction_sets("Features : fp asimd bf16 i8mm") == ["asimd", "i8mm", "bf16"]
    assert probe_hardware.instruction_sets("") == []


@pytest.mark.parametrize(
    ("cpuinfo", "lacks"),
    [(ZEN4, ""), ("flags : avx2", "bfloat16 or int8"), ("flags : avx2 avx512_vnni", "No bfloat16 products")],
)
def test_isa_names_what_is_slow(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, lacks: str) -> None:
    monkeypatch.setattr(probe_hardware, "_read", lambda path: cpuinfo)
    finding = probe_hardware.probe_isa()
    assert (finding.status == "limited") == bool(lacks)
    assert lacks in finding.consequence


@pytest.mark.parametrize(("threads", "status"), [(1, "ok"), (64, "limited")])
def test_more_threads_than_cores_is_limited(
    monkeypatch: pytest.MonkeyPatch, threads: int, status: str
) -> None:
    monkeypatch.setattr(probe_hardware, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    finding = probe_hardware.probe_cores()
    assert finding.status == status
    assert ("OMP_NUM_THREADS=2" in finding.remedy) == (status == "limited")


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("150000 100000", 1), ("50000 100000", 1), ("", 8)]
)
def test_container_quota_cuts_the_cores(monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(probe_hardware, "_read", lambda path: quota)
    assert probe_hardware.usable_cores() == cores


def test_container_limit_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/sys/fs/cgroup/memory.max": str(2 * 2**30), "/sys/fs/cgroup/memory.current": str(2**30)}
    monkeypatch.setattr(room, "_read", lambda path: texts.get(path, ""))
    assert room.memory_limit() == (2 * 2**30, min(2**30, psutil.virtual_memory().available))
    assert probe_hardware.probe_memory().status == "limited"
    monkeypatch.setattr(room, "_read", lambda path: "max")
    assert room.memory_limit()[0] == psutil.virtual_memory().total


def test_disk_of_a_folder_that_does_not_exist_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        free = 10 * 2**30

    monkeypatch.setattr(probe_hardware.shutil, "disk_usage", lambda path: Usage)
    assert probe_hardware.probe_disk(tmp_path / "a" / "b").status == "ok"
    Usage.free = 2**20
    assert probe_hardware.probe_disk(tmp_path / "a" / "b").status == "limited"
    monkeypatch.setattr(probe_hardware.os, "access", lambda path, mode: False)
    assert probe_hardware.probe_disk(tmp_path / "a").status == "missing"


def test_driver_without_a_cuda_build_is_told_apart_from_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(probe_hardware.shutil, "which", lambda name: None)
    assert probe_hardware.probe_gpu().status == "missing"
    monkeypatch.setattr(probe_hardware.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = probe_hardware.probe_gpu()
    assert finding.status == "limited" and "built for the CPU" in finding.found
