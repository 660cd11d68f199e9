"""A folder of safetensors files as a checkpoint source: memory-mapped, checked before use.

Opening reads headers only. Shards, names, shapes and dtypes are all checked against the
configuration first, so a source that opens is complete; tensors are views of the mapped files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.models.cache import remembered
from workbench.models.config import ModelConfig
from workbench.models.folder import MAX_TENSORS, check_header, inside, read_config, shards
from workbench.models.layout import HEAD, check_layout, resolve_tie
from workbench.models.source import update_fingerprint
from workbench.spec.errors import MissingTensor, ModelNotFound, UnsafeFile

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TEXT_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")


class SafetensorsSource:
    """A Hugging Face folder. ``hf`` is its parsed ``config.json`` with the tie flag made explicit."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ModelNotFound(f"There is no folder {self.folder}.", hint="Check the path.")
        expected = shards(self.folder)
        hf = read_config(self.folder)
        self._files = [inside(self.folder, name) for name in expected]
        self._where: dict[str, tuple[Any, str]] = {}
        for path, names in zip(self._files, expected.values(), strict=True):
            self._open(path, names)
        tied = resolve_tie(hf, HEAD in self._where, str(self.folder))
        self.hf = hf | {"tie_word_embeddings": tied}
        if isinstance(hf.get("text_config"), dict):
            self.hf["text_config"] = hf["text_config"] | {"tie_word_embeddings": tied}
        self.config = ModelConfig.from_hf(self.hf)
        if tied:
            self._where.pop(HEAD, None)  # the flag wins over a stored copy, as in transformers
        check_layout(self.config, self._where, self._describe, str(self.folder))

    def names(self) -> Collection[str]:
        """Canonical names of all tensors held; a tied head is not among them."""
        return self._where.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype, a view of the mapped file; do not write to it."""
        if name not in self._where:
            raise MissingTensor(
                f"{self.folder} has no tensor {name!r}.",
                hint=f"It holds {len(self._where)} tensors; check the name against the configuration.",
            )
        handle, stored = self._where[name]
        tensor: torch.Tensor = handle.get_tensor(stored)
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the mapped files."""
        return sum(path.stat().st_size for path in self._files)

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over names, dtypes, shapes and contents: equal however the checkpoint is sharded."""
        return remembered("tensors", [*self._files, self.folder / "config.json"], self._hash)

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self._where):
            update_fingerprint(digest, name, self.tensor(name))
        return digest.hexdigest()

    def _open(self, path: Path, names: frozenset[str] | None) -> None:
        try:
            check_header(path)
            handle = safe_open(path, framework="pt", device="cpu")
            found: frozenset[str] = frozenset(handle.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, ValueError) as error:
            raise UnsafeFile(
                f"{path} is damaged or cut short ({error}).", hint="Fetch the checkpoint again."
            ) from error
        absent = sorted((names or frozenset()) - found)
        if absent:
            raise MissingTensor(
                f"{path} lacks the tensor {absent[0]!r} that the index places there.",
                hint="Index and shards belong to different versions; fetch the checkpoint again.",
            )
        if len(self._where) + len(found) > MAX_TENSORS:
            raise UnsafeFile(f"{path} announces more than {MAX_TENSORS} tensors.", hint="Check its origin.")
        for stored in names or found:
            name = canonical_name(stored)
            if name is not None:
                self._where[name] = (handle, stored)

    def _describe(self, name: str) -> tuple[tuple[int, ...], str]:
        handle, stored = self._where[name]
        piece = handle.get_slice(stored)
        return tuple(piece.get_shape()), _DTYPES.get(piece.get_dtype(), piece.get_dtype())


def canonical_name(stored: str) -> str | None:
    """The name in a text-only checkpoint; None for tensors of a vision tower."""
    if stored == "language_model.lm_head.weight":
        return HEAD
    name = _TEXT_PREFIX.sub("model.", stored)
    return None if "vision" in name or "multi_modal_projector" in name else name
