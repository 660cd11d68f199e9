"""Opening a model folder safely: what is read, what is refused, and what must be there first.

A folder is data from strangers. Only JSON and safetensors are read; pickled weights, remote code
(``auto_map``), links that leave the folder and headers of absurd size are refused by name. Every
shard of an index is checked, with the names it must hold, before any tensor is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.spec.errors import MissingTensor, ModelNotFound, UnsafeFile, UnsupportedModel

MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 100_000
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")
INDEX = "model.safetensors.index.json"


def inside(folder: Path, name: str) -> Path:
    """``folder / name``, refusing names with a path in them and links that leave the folder.

    In a Hugging Face cache (``models--*/snapshots/<revision>``) links may point to the blobs of the
    same repository.
    """
    path = folder / name
    if Path(name).name != name:
        raise UnsafeFile(
            f"{folder.name} names the file {name!r} outside its folder.",
            hint="Fetch the checkpoint again from a source you trust.",
        )
    root = folder.resolve()
    allowed = root.parent.parent if root.parent.name == "snapshots" else root
    if path.exists() and not path.resolve().is_relative_to(allowed):
        raise UnsafeFile(
            f"{folder.name}/{name} is a link that leaves the model folder.",
            hint="Copy the file into the folder if you trust it.",
        )
    return path


def read_json(folder: Path, name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from the folder, bounded in size. Raises ``ModelNotFound`` or ``UnsafeFile``."""
    path = inside(folder, name)
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no {name}.", hint="Give the folder of a Hugging Face checkpoint.")
    if path.stat().st_size > limit:
        raise UnsafeFile(
            f"{folder.name}/{name} is larger than {limit >> 20} MiB.", hint="This is no such file."
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFound(
            f"{folder}/{name} cannot be read: {error.strerror}.", hint="Check its permissions."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UnsafeFile(
            f"{folder.name}/{name} is not valid JSON ({error}).", hint="Fetch it again."
        ) from error
    if not isinstance(content, dict):
        raise UnsafeFile(f"{folder.name}/{name} holds no JSON object.", hint="Fetch it again.")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, refusing remote code and quantized checkpoints."""
    config = read_json(folder, "config.json")
    if "auto_map" in config:
        raise UnsafeFile(
            f"{folder.name}/config.json asks to run code from the checkpoint (auto_map).",
            hint="The workbench never runs it; remove auto_map if the architecture is a stock one.",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
        raise UnsupportedModel(
            f"{folder.name} is a quantized checkpoint ({method}).",
            hint="Load the 16-bit checkpoint and quantize it with a weight technique.",
        )
    return config


def shards(folder: Path) -> dict[str, frozenset[str] | None]:
    """File name -> tensors the index says it holds (None without an index), all files checked to exist.

    Raises ``MissingTensor`` naming an absent shard, ``UnsafeFile`` for pickles, ``ModelNotFound`` for
    a folder without weights.
    """
    if (folder / INDEX).exists():
        weight_map = read_json(folder, INDEX, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
            raise UnsafeFile(f"{folder.name}/{INDEX} has no usable weight_map.", hint="Fetch it again.")
        found: dict[str, set[str]] = {}
        for tensor, file in weight_map.items():
            found.setdefault(str(file), set()).add(tensor)
        for file in sorted(found):
            _safetensors_only(folder, file)
            if not inside(folder, file).is_file():
                raise MissingTensor(
                    f"{folder} lacks the shard {file!r} named in {INDEX} ({len(found[file])} tensors).",
                    hint="Fetch the checkpoint again; nothing was loaded.",
                )
        return {file: frozenset(names) for file, names in sorted(found.items())}
    single = sorted(p.name for p in folder.glob("*.safetensors") if p.is_file())
    if "model.safetensors" in single:
        single = ["model.safetensors"]
    if len(single) == 1:
        inside(folder, single[0])
        return {single[0]: None}
    if single:
        raise MissingTensor(
            f"{folder} holds {len(single)} safetensors files but no {INDEX}.",
            hint="Fetch the index too, or keep a single file.",
        )
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES) if folder.is_dir() else []
    if pickled:
        _safetensors_only(folder, pickled[0])
    raise ModelNotFound(
        f"{folder} holds no safetensors weights.",
        hint="Give the folder of a Hugging Face checkpoint, or a .gguf file.",
    )


def check_header(path: Path) -> None:
    """Refuse a safetensors file whose header is absurd, before a parser sees it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or length > min(MAX_HEADER_BYTES, size - 8) or start[8:9] != b"{":
        raise UnsafeFile(
            f"{path.name} is no safetensors file: its header claims {length} bytes, the file has {size}.",
            hint="Fetch it again from a source you trust.",
        )


def _safetensors_only(folder: Path, name: str) -> None:
    if not name.endswith(".safetensors"):
        raise UnsafeFile(
            f"{folder.name}/{name}: only safetensors weights are read; pickles can run code.",
            hint="Use the safetensors version of the checkpoint, or convert it in a sandbox.",
        )
