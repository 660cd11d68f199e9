"""A GGUF file as a checkpoint source: mapped, dequantized on demand, in canonical names and layouts.

Every quantization the ``gguf`` package can dequantize is read (Q4_0, Q4_1, Q5_x, Q8_0, the K and IQ
families, MXFP4 ...); F16 / BF16 / F32 tensors keep their dtype, quantized ones come out as float32.
Query/key row order and Gemma's norm offset are undone (``gguf_map``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.models.cache import remembered_sha256
from workbench.models.config import ModelConfig
from workbench.models.gguf_config import hf_config
from workbench.models.gguf_map import IGNORED, hf_name, restore
from workbench.models.layout import HEAD, check_layout
from workbench.spec.errors import MissingExtra, MissingTensor, ModelNotFound, UnsafeFile, UnsupportedModel

_MAX_TENSORS, _MAX_KEYS = 100_000, 10_000


class GGUFSource:
    """One GGUF file. ``metadata`` is its key/value store; ``hf`` the configuration derived from it.

    ``formats`` maps each canonical name to its stored format ("Q4_1", "F32" ...).
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        reader = _open(self.path)
        self.metadata: dict[str, Any] = {k: f.contents() for k, f in reader.fields.items()}
        self._arch = str(self.metadata.get("general.architecture"))
        stored = {t.name: t for t in reader.tensors}
        self._tensors = {hf_name(self._arch, name): t for name, t in stored.items() if name not in IGNORED}
        freqs = stored["rope_freqs.weight"].data if "rope_freqs.weight" in stored else None
        if "token_embd.weight" not in stored:
            raise MissingTensor(
                f"{self.path.name} lacks 'token_embd.weight'.", hint="Download the file again."
            )
        vocab = int(stored["token_embd.weight"].shape[1])  # GGUF lists the fastest dimension first
        self.hf = hf_config(self.metadata, frozenset(stored), vocab, freqs)
        self.config = ModelConfig.from_hf(self.hf)
        self.formats = {name: t.tensor_type.name for name, t in self._tensors.items()}
        check_layout(self.config, self._tensors, self._describe, self.path.name)

    def names(self) -> Collection[str]:
        """Canonical names of all tensors held; a tied head is not among them."""
        return [n for n in self._tensors if not (n == HEAD and self.config.tie_embeddings)]

    def tensor(self, name: str) -> torch.Tensor:
        """Values of ``name``: stored dtype for F32 / F16 / BF16, float32 for quantized formats."""
        if name not in self._tensors:
            raise MissingTensor(f"{self.path.name} has no tensor {name!r}.", hint="Check the configuration.")
        stored = self._tensors[name]
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        return restore(self._arch, stored.name, _values(stored), heads, kv_heads).contiguous()

    @property
    def nbytes(self) -> int:
        """Size of the mapped file in bytes."""
        return self.path.stat().st_size

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 that stands for the file's content (its own sha256, under a label)."""
        return hashlib.sha256(f"gguf\0{remembered_sha256(self.path)}".encode()).hexdigest()

    def _describe(self, name: str) -> tuple[tuple[int, ...], str]:
        tensor = self._tensors[name]
        return tuple(int(d) for d in reversed(tensor.shape)), "float32"


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingExtra("gguf", "formats", "Reading GGUF files") from None
    if not path.is_file():
        raise ModelNotFound(f"There is no GGUF file {path}.", hint="Check the path.")
    with path.open("rb") as file:
        head = file.read(24)
    tensors, keys = (int.from_bytes(head[i : i + 8], "little") for i in (8, 16))
    if head[:4] != b"GGUF" or tensors > _MAX_TENSORS or keys > _MAX_KEYS:
        raise UnsafeFile(
            f"{path.name} is not a GGUF file, or its header announces {tensors} tensors and {keys} keys.",
            hint="Download it again from its source.",
        )
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise UnsafeFile(
            f"{path.name} is damaged or cut short ({error}).", hint="Download it again from its source."
        ) from error


def _values(tensor: Any) -> torch.Tensor:
    import gguf

    kind = gguf.GGMLQuantizationType
    shape = tuple(int(d) for d in reversed(tensor.shape))
    if tensor.tensor_type in (kind.F32, kind.F16, kind.F64):
        return torch.from_numpy(np.array(tensor.data)).reshape(shape)
    if tensor.tensor_type == kind.BF16:
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(shape)
    try:
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
    except NotImplementedError:
        raise UnsupportedModel(
            f"{tensor.name!r} is stored as {tensor.tensor_type.name}, which cannot be dequantized.",
            hint="Use a file in another GGUF format, e.g. Q8_0 or F16.",
        ) from None
