"""What the doctor asks the installation: Python, packages, extras, notebook stack, browser, models.

Versions are looked up in the installed metadata, so nothing heavy is imported; requirements and extras are
those that the distribution itself declares.
"""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import shutil
import sys

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from workbench.cli.finding import Finding, Status
from workbench.core.peers import peers_of_extra
from workbench.spec.errors import ModelError, StorageError
from workbench.spec.install import NAME as DISTRIBUTION
from workbench.spec.install import install_line

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# What is lost without each extra.
EXTRAS = {
    "lab": "No notebooks, panels, figures or HTML reports.",
    "gpu": "Kernels written in Triton can be neither run on a GPU nor checked without one; torch operations "
    "run in their place.",
    "codec": "No entropy-coded KV caches (kvtc, cachegen).",
    "grammar": "No output constrained by a regex or a JSON schema.",
    "formats": "No GGUF files, so the default model cannot be converted; no compressed-tensors export.",
    "peers": f"Nothing to compare with of {', '.join(peers_of_extra('peers'))} in `workbench bench --peer`.",
    "dev": "No tests, lint or builds.",
}


def installed(package: str) -> Version | None:
    """The installed version of a package, without importing it."""
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def requirements(extra: str = "") -> list[Requirement]:
    """What the distribution declares for an extra, or for the core when ``extra`` is empty.

    Raises ``importlib.metadata.PackageNotFoundError`` when the workbench itself is not installed.
    """
    declared = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    core = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]
    if not extra:
        return core
    return [r for r in declared if r not in core and r.marker and r.marker.evaluate({"extra": extra})]


def unmet(wanted: list[Requirement]) -> list[str]:
    """Requirements that are absent or of the wrong version, in words."""
    problems = []
    for requirement in wanted:
        version = installed(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} absent")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is outside {requirement.specifier}")
    return problems


def probe_python() -> Finding:
    """The interpreter, against the versions that the distribution declares."""
    found = platform.python_version()
    try:
        supported = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        supported = ""  # probe_core reports the missing installation
    if not SpecifierSet(supported).contains(found, prereleases=True):
        return Finding(
            "python",
            "missing",
            found,
            f"The workbench supports Python {supported} only.",
            "Remove .venv and run `make setup PYTHON=...` with a supported one.",
            essential=True,
        )
    return Finding("python", "ok", found, essential=True)


def probe_core() -> Finding:
    """Torch, transformers and the other packages without which nothing runs."""
    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:
        return Finding(
            "packages",
            "missing",
            f"{DISTRIBUTION} is not installed",
            "Versions and extras cannot be checked.",
            "pip install --editable .",
            essential=True,
        )
    problems = unmet(wanted)
    if problems:
        return Finding(
            "packages",
            "missing",
            "; ".join(problems),
            "The engine cannot run, or runs untested.",
            install_line(),
            essential=True,
        )
    shown = ("torch", "transformers", "numpy")
    found = ", ".join(f"{name} {installed(name)}" for name in shown)
    return Finding("packages", "ok", found, essential=True)


def probe_extras() -> list[Finding]:
    """One finding per extra, with the line that installs it."""
    findings = []
    for extra, consequence in EXTRAS.items():
        name, remedy = f"extra {extra}", install_line(extra)
        try:
            wanted = requirements(extra)
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, "missing", "the workbench is not installed", consequence, remedy))
            continue
        problems = unmet(wanted)
        if not problems:
            found = ", ".join(f"{r.name} {installed(r.name)}" for r in wanted) or "nothing for this system"
            findings.append(Finding(name, "ok", found))
        else:
            partly: Status = "limited" if len(problems) < len(wanted) else "missing"
            findings.append(Finding(name, partly, "; ".join(problems), consequence, remedy))
    return findings


def probe_triton(gpu: bool) -> Finding:
    """Whether Triton kernels can be compiled, interpreted, or not run at all."""
    version = installed("triton")
    if version is None:
        return Finding(
            "triton",
            "missing",
            "not installed",
            "Kernels written in Triton are left out: torch operations run in their place.",
            install_line("gpu") + ("" if gpu else "; only of use with an NVIDIA GPU"),
        )
    if not gpu:
        return Finding(
            "triton",
            "limited",
            f"{version}, without a GPU",
            "Triton kernels run on a GPU only. Here an interpreter checks their numbers, and their machine "
            "code for Hopper can be read; they cannot be timed.",
            "workbench kernels shows the machine code; with TRITON_INTERPRET=1 set, Python interprets.",
        )
    return Finding("triton", "ok", str(version))


def probe_compiler() -> Finding:
    """Whether the C++ kernels of `compiled` can be built here."""
    from workbench.kernels.cpu import compiler

    lost = "No `compiled`: layers run as torch operations, decoding takes about twice as long."
    if not compiler.supported():
        return Finding("C++ compiler", "missing", f"not used on {sys.platform}", lost, "Use 64-bit Linux.")
    found = compiler.find()
    if found is None:
        why = compiler.none_found()
        return Finding("C++ compiler", "missing", why.message, lost, why.hint)
    return Finding("C++ compiler", "ok", found)


def probe_notebooks() -> Finding:
    """Whether controls stay alive while a cell runs: kernel subshells need JupyterLab 4.4 and ipykernel 7."""
    lab, kernel = installed("jupyterlab"), installed("ipykernel")
    if lab is None or kernel is None:
        return Finding(
            "live controls",
            "missing",
            "no JupyterLab",
            "Scripts and the command line work; panels do not.",
            install_line("lab"),
        )
    found = f"jupyterlab {lab}, ipykernel {kernel}"
    if lab < Version("4.4") or kernel < Version("7"):
        return Finding(
            "live controls",
            "limited",
            found,
            "No kernel subshells: controls act only after the cell ends.",
            "pip install 'jupyterlab>=4.4' 'ipykernel>=7'",
        )
    return Finding("live controls", "ok", f"{found}: subshells")


def probe_browser() -> Finding:
    """A browser for the interface tests and for pictures of panels."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        return Finding(
            "browser",
            "missing",
            "no chromium",
            "The tests in tests/ui are skipped.",
            "Debian and Ubuntu: apt-get install chromium",
        )
    return Finding("browser", "ok", found)


def probe_models() -> list[Finding]:
    """Which models of the registry can be opened here; those that ship are essential. Downloads nothing."""
    from workbench.models.registry import LocalSource, registry

    return [
        probe_model(name, essential=any(isinstance(s, LocalSource) for s in entry.sources))
        for name, entry in registry().items()
    ]


def probe_model(name: str, *, essential: bool = False) -> Finding:
    """Whether a named model is ready to be opened; never downloads."""
    from workbench.models.registry import resolve

    try:
        folder = resolve(name)
    except (ModelError, StorageError) as error:
        return Finding(
            f"model {name}",
            "missing",
            error.message,
            "Sessions and notebooks on it cannot start.",
            error.hint or f"workbench fetch {name}",
            essential=essential,
        )
    return Finding(f"model {name}", "ok", str(folder), essential=essential)
