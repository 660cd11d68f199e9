"""Writing model folders: safetensors, config, tokenizer and a note of where the weights came from.

Weights become bfloat16. One-dimensional tensors (norm gains, biases) do too when that loses
nothing, and stay float32 when it would. A folder appears complete or not at all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workbench.models.cache import new_folder, remembered_sha256
from workbench.models.gguf_source import GGUFSource
from workbench.models.gguf_tokenizer import build_tokenizer
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.safetensors_source import SafetensorsSource
from workbench.spec.errors import ModelError

VERSION = 1
"""Raised when a conversion would come out differently; older folders are then made again."""

NOTE = "workbench.json"
_FLOATING = ("F32", "F16", "BF16", "F64")


def write_folder(
    target: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    note: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model folder atomically: ``model.safetensors``, ``config.json`` and the origin note.

    Tensors may be views of each other or strided: each is stored once, contiguous. A head that is
    the embedding (same storage, or ``tie_word_embeddings``) is left out, as Hugging Face does.
    """
    with new_folder(Path(target)) as folder:
        save_weights(folder, tensors, config)
        _write_json(folder / NOTE, {"version": VERSION, **(note or {})})
    return Path(target)


def save_weights(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` and ``config.json`` into an existing folder."""
    head, embed = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    tied = head is not None and embed is not None and _same_memory(head, embed)
    config = {**config, "tie_word_embeddings": True} if tied else dict(config)
    kept = {
        n: t for n, t in tensors.items() if not (n == "lm_head.weight" and config.get("tie_word_embeddings"))
    }
    # A copy per tensor: safetensors refuses shared and strided storages, and a view would drag in its base.
    stored = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in kept.items()}
    weights = folder / "model.safetensors"
    save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes private files; a shared cache is read by others
    _write_json(folder / "config.json", config)


def convert_gguf(
    path: Path,
    target: Path,
    *,
    origin: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Path:
    """Convert a GGUF file to a Hugging Face folder at ``target``; returns ``target``.

    ``origin`` (source, licence, notes) is kept in ``workbench.json`` beside the file's sha256, the
    stored formats and, for quantized files, the note that the weights already sat on a grid.
    Raises the errors of ``GGUFSource``, ``build_tokenizer`` and ``check_written``, ``Cancelled``.
    """
    report(progress, 0.0, f"reading {path.name}")
    source = GGUFSource(path)
    tokenizer, tokenizer_config = build_tokenizer(source.metadata)
    names = sorted(source.names())
    tensors = {}
    for i, name in enumerate(names):
        check_cancel(cancel, f"Converting {path.name}")
        report(progress, 0.1 + 0.7 * i / len(names), f"converting {name}")
        tensors[name] = as_stored(source.tensor(name))
    config = {k: v for k, v in source.hf.items() if v is not None} | {"dtype": "bfloat16"}
    with new_folder(Path(target)) as folder:
        report(progress, 0.8, "writing the model folder")
        save_weights(folder, tensors, config)
        check_written(folder, tensors, cancel)
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config)
        ids: dict[str, Any] = {
            k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config
        }
        _write_json(folder / "generation_config.json", ids)
        _write_json(folder / NOTE, {"version": VERSION, **(origin or {}), **gguf_note(source)})
    report(progress, 1.0, "ready")
    return Path(target)


def check_written(folder: Path, tensors: Mapping[str, torch.Tensor], cancel: Cancel | None = None) -> None:
    """Read a folder's weights back and compare every bit; what they were made from may go afterwards.

    Raises ``ModelError`` when the disk gave back something else.
    """
    written = SafetensorsSource(folder)
    for name in written.names():
        check_cancel(cancel, f"Checking {name}")
        if not torch.equal(_bits(written.tensor(name)), _bits(tensors[name])):
            raise ModelError(
                f"{name} was read back from the disk with other values than were written.",
                hint="Check the disk, or set WORKBENCH_CACHE to a folder on another one.",
            )


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16, except one-dimensional tensors that bfloat16 cannot hold exactly: float32."""
    rounded = tensor.to(torch.bfloat16)
    if tensor.dim() == 1 and not torch.equal(rounded.to(tensor.dtype), tensor):
        return tensor.to(torch.float32)
    return rounded


def gguf_note(source: GGUFSource) -> dict[str, Any]:
    """What a folder made from a GGUF file must say about its weights."""
    linears = Counter(f for n, f in source.formats.items() if n.endswith("_proj.weight"))
    grids = [fmt for fmt, _ in linears.most_common() if fmt not in _FLOATING]
    note: dict[str, Any] = {
        "file": source.path.name,
        "file_sha256": remembered_sha256(source.path),
        "formats": dict(Counter(source.formats.values())),
    }
    if grids:
        grid = ", ".join(grids)
        note["weight_grid"] = grid
        note["weight_note"] = (
            f"The linear weights already sat on a grid ({grid}) before they were widened to bfloat16. Losses "
            "of other quantizers are relative to that reference, and one with the same grid looks free."
        )
    return note


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
