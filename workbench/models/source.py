"""Where weights come from: the ``Source`` protocol and an in-memory one.

A source is a checkpoint as stored (usually memory-mapped), under the canonical names of
Hugging Face checkpoints such as ``model.layers.0.self_attn.q_proj.weight``. Everything that
folds, fuses or packs reads a source and never changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Protocol

import torch

from workbench.models.config import ModelConfig
from workbench.spec.errors import MissingTensor


class Source(Protocol):
    """A checkpoint with its configuration.

    ``fingerprint`` is a hex sha256 over names, shapes, dtypes and contents; ``nbytes`` counts the
    bytes of the mapped files (or held tensors), apart from any weight set built from them.
    """

    @property
    def config(self) -> ModelConfig:
        """Sizes and structure."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over names, shapes, dtypes and contents."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the mapped files or held tensors."""
        ...

    def names(self) -> Collection[str]:
        """Canonical names of all tensors held."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype. Raises ``MissingTensor`` naming it."""
        ...


class DictSource:
    """A source over a mapping of tensors already in memory, e.g. a model being trained.

    The tensors are shared, not copied; the fingerprint is taken at first use, so do not write to
    them afterwards.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def names(self) -> Collection[str]:
        """Canonical names of all tensors held."""
        return self._tensors.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its stored dtype. Raises ``MissingTensor`` naming it."""
        try:
            return self._tensors[name]
        except KeyError:
            raise MissingTensor(
                f"The source has no tensor {name!r}.",
                hint=f"It holds {len(self._tensors)} tensors; check the names against the configuration.",
            ) from None

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 over names, shapes, dtypes and contents, in name order."""
        digest = hashlib.sha256()
        for name in sorted(self._tensors):
            update_fingerprint(digest, name, self._tensors[name])
        return digest.hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the distinct storages held."""
        storages = (t.untyped_storage() for t in self._tensors.values())
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def update_fingerprint(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    """Feed one named tensor (name, dtype, shape, bytes in row-major order) into ``digest``."""
    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    digest.update(flat.view(torch.uint8).numpy().data)
