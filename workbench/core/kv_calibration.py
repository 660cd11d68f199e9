"""Measures the ranges of a model's keys and values once per weight set, and remembers them on disk.

The model is run plainly (16-bit KV, the plan's weights and numerics) over calibration text, twice: means,
then maxima. A model without a tokenizer is calibrated on random token ids, and the artefact says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from workbench.core.artefacts import kept
from workbench.core.texts import shipped_text
from workbench.engine.executor import Executor
from workbench.engine.seams import AttentionOp, PageGeometry, SpanPlan, StepPlan
from workbench.engine.store import PageStore
from workbench.kv.plain import PlainCodec
from workbench.kv.ranges import VARIANTS, KVRanges, RangeRecorder
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelError

SEQUENCES = 8
LENGTH = 512
_VERSION = 1


def calibration_ids(model: str, vocab: int, longest: int) -> tuple[str, list[list[int]]]:
    """What to calibrate on: its description and at most 8 sequences of at most 512 token ids."""
    length = min(LENGTH, longest)
    try:
        ids = load_tokenizer(model).encode(shipped_text("calibration"))
        origin = f"{SEQUENCES} x {length} tokens of the shipped calibration text"
    except ModelError:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (SEQUENCES * length,), generator=generator).tolist()
        origin = f"{SEQUENCES} x {length} random token ids (the model has no tokenizer)"
    step = max((len(ids) - length) // SEQUENCES, 1)  # spread over all documents
    return origin, [ids[i * step : i * step + length] for i in range(SEQUENCES)]


def kv_ranges(
    decoder: Decoder,
    op: Callable[[], AttentionOp],
    *,
    model: str,
    weights: Sequence[str],
    page_size: int = 64,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> KVRanges:
    """The ranges of a decoder's keys and values: from disk, or measured now.

    ``weights`` names the weight set, ``op`` makes an attention. Raises ``Cancelled`` between two sequences.
    """
    config = decoder.config
    origin, ids = calibration_ids(model, config.vocab_size, config.max_position)
    parts = (str(_VERSION), decoder.weights.fingerprint, repr(config), *weights, origin, repr(ids))
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def make() -> KVRanges:
        return _measure(decoder, op(), ids, origin, page_size, progress, cancel)

    shape = (2, config.num_layers, config.num_kv_heads, config.head_dim)
    return kept(f"kv_ranges-{digest}", lambda path: _read(path, shape), make, _write, cancel)


def kv_rows(
    decoder: Decoder, op: AttentionOp, ids: Sequence[int], page_size: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Layer, keys and values [T, Hkv, D] of one sequence, as a KV codec would be given them."""
    config = decoder.config
    pages = -(-len(ids) // page_size)
    seen: list[tuple[int, Tensor, Tensor]] = []

    class Spy(PageStore):
        """Notes what is written."""

        numbers: tuple[int, ...] = ()

        def write(self, layer: int, where: Tensor, k: Tensor, v: Tensor) -> None:
            """Note the rows, then write them."""
            seen.append((self.numbers[layer], k, v))
            super().write(layer, where, k, v)

    stores: list[PageStore] = []
    dtype = decoder.weights.dtype
    for group in config.kv_groups:
        geometry = PageGeometry(
            layers=len(group.layers),
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            pages=pages,
            dtype=dtype,
            device=decoder.weights.device,
        )
        store = Spy(PlainCodec(dtype), PlainCodec(dtype), geometry)
        store.numbers = tuple(group.layers)
        stores.append(store)
    table = tuple(range(1, pages + 1))
    span = SpanPlan(0, tuple(ids), tuple(range(len(ids))), 0, (table,) * len(stores), 1)
    executor = Executor(decoder, stores, op)
    with torch.inference_mode():
        executor.forward(executor.prepare(StepPlan(0, (span,))))
    yield from seen


def _measure(
    decoder: Decoder,
    op: AttentionOp,
    ids: Sequence[Sequence[int]],
    origin: str,
    page_size: int,
    progress: Progress | None,
    cancel: Cancel | None,
) -> KVRanges:
    config = decoder.config
    recorder = RangeRecorder(config.num_layers, config.num_kv_heads, config.head_dim)
    for i, sequence in enumerate([*ids, *ids]):
        check_cancel(cancel, "Calibrating the KV format")
        if i == len(ids):
            recorder.means_done()
        for layer, k, v in kv_rows(decoder, op, sequence, page_size):
            recorder.add(layer, k, v)
        report(progress, (i + 1) / (2 * len(ids)), "calibrating the KV format")
    return recorder.ranges(origin)


def _read(path: Path, shape: tuple[int, ...]) -> KVRanges | None:
    """The artefact, or None when there is none that can be read: means of ``shape``, all numbers finite."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            notes: dict[str, Any] = file.metadata()
            amax = {v: file.get_tensor(f"amax.{v}") for v in VARIANTS}
            found = KVRanges(file.get_tensor("mean"), amax, notes["origin"], int(notes["tokens"]))
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return None
    whole = found.mean.shape == shape and all(t.shape == shape[:-1] for t in amax.values())
    return found if whole and all(bool(t.isfinite().all()) for t in (found.mean, *amax.values())) else None


def _write(path: Path, ranges: KVRanges) -> None:
    tensors = {"mean": ranges.mean, **{f"amax.{v}": t for v, t in ranges.amax.items()}}
    save_file(tensors, path, {"origin": ranges.origin, "tokens": str(ranges.tokens)})
