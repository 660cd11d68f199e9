"""Trained draft heads as files: where they are, for which weights they were trained, what was measured.

``heads/<target>/<kind>.safetensors`` below the cache folder (trained here) or the data folder (shipped). The
header holds the fingerprint of the weights that the head was trained on: on others it would only be wrong
more often, and nobody would know why.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save
from torch import Tensor

from workbench.models.cache import cache_dir
from workbench.models.datadir import data_dir
from workbench.spec.errors import HeadMismatch, MissingHead, ModelError, StorageError

FORMAT = "workbench-head/1"
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class HeadFile:
    """A head on disk; ``facts`` is JSON: its recipe, and what was measured of it."""

    path: Path
    kind: str
    fingerprint: str
    facts: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Names the file by its contents. Raises :class:`HeadMismatch` for one that cannot be read."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise HeadMismatch(
                f"The head {self.path} cannot be read: {error}.", hint="Train it again."
            ) from None

    def tensors(self) -> dict[str, Tensor]:
        """All tensors. Raises :class:`HeadMismatch` for a file that cannot be read or holds no numbers."""
        try:
            found = load_file(self.path)
        except (OSError, safetensors.SafetensorError) as error:
            raise HeadMismatch(
                f"The head {self.path} cannot be read: {error}.", hint="Train it again."
            ) from None
        try:
            finite = all(bool(t.isfinite().all()) for t in found.values() if t.is_floating_point())
        except NotImplementedError as error:  # of eight bits or fewer
            raise HeadMismatch(
                f"The head {self.path} holds numbers of a kind that none has: {error}.",
                hint="Train it again.",
            ) from None
        if not finite:
            raise HeadMismatch(
                f"The head {self.path} holds numbers that are not finite.", hint="Train it again."
            )
        return found


def target_name(model: str | Path) -> str:
    """The name of a model's folder of heads: its own, or that of its folder or file."""
    return Path(model).stem if str(model).endswith(".gguf") else Path(model).name


def places(model: str | Path, kind: str) -> Iterator[Path]:
    """Where a head may be, best first."""
    name = Path("heads") / target_name(model) / f"{kind}.safetensors"
    for root in (cache_dir, data_dir):
        try:
            yield root() / name
        except (StorageError, ModelError):
            continue


def find_head(model: str | Path, kind: str, fingerprint: str) -> HeadFile:
    """The head of a kind for a model's weights; an empty ``fingerprint`` takes any (planning alone).

    Raises :class:`MissingHead`, or :class:`HeadMismatch` when there is one, but for other weights.
    """
    others = []
    again = f"'workbench train {kind} --target {model}'"
    for path in places(model, kind):
        if not _is_there(path):
            continue
        found = read_head(path, hint=f"Delete it, or train it again: {again}")
        if found.kind == kind and fingerprint in ("", found.fingerprint):
            return found
        others.append(found)
    remedy = f"Train one: {again}"
    if others:
        raise HeadMismatch(
            f"The {kind} head of {target_name(model)} was trained for other weights "
            f"({others[0].fingerprint[:12]} instead of {fingerprint[:12]}): {others[0].path}.",
            hint=remedy,
        )
    raise MissingHead(f"There is no {kind} head for {target_name(model)}.", hint=remedy)


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # its folder may not be looked into
        raise HeadMismatch(
            f"{path} cannot be looked for: {error.strerror}.", hint="Let yourself read its folder."
        ) from None


def read_head(path: Path, *, hint: str = "Train it again.") -> HeadFile:
    """The header of a head file. Raises :class:`HeadMismatch` for what is none; ``hint`` is its way out."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is absurdly large")
        with safetensors.safe_open(path, framework="pt") as file:
            notes: dict[str, str] = file.metadata() or {}
        if notes["format"] != FORMAT:
            raise ValueError(f"its format is {notes['format']}")
        facts = json.loads(notes["facts"])
        if not isinstance(facts, dict):
            raise ValueError("its facts are no object")
        return HeadFile(path, notes["kind"], notes["fingerprint"], facts)
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise HeadMismatch(f"{path} is no head that can be read: {error}.", hint=hint) from None


def write_head(
    path: Path, kind: str, fingerprint: str, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write a head; it appears whole or not at all, and equal heads are equal files.

    Raises :class:`StorageError`.
    """
    notes = {
        "format": FORMAT,
        "kind": kind,
        "fingerprint": fingerprint,
        "facts": json.dumps(facts, sort_keys=True, allow_nan=False),
    }
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(_in_order(save({n: tensors[n].contiguous() for n in sorted(tensors)}, notes)))
        unfinished.chmod(0o644)  # who made it is not the only one to use it
        unfinished.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise StorageError(
            f"The head cannot be written to {path}: {error}.", hint="Choose another place with --out."
        ) from None


def _in_order(data: bytes) -> bytes:
    """A safetensors file whose notes come by name: the library writes them in an order of chance."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text + data[start:]
