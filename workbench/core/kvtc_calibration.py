"""Measures what KVTC needs to know of a model, once per weight set, and remembers it on disk.

The model is run plainly (16-bit KV, the plan's weights and numerics) over calibration text, in sequences of
1,024 tokens. Most of them give mean and components of keys and values; every eighth is held out of those, and
gives the errors that bits are planned by, so that the plan is not flattered. One artefact serves all ratios.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from workbench.core.artefacts import kept, require_measuring
from workbench.core.kv_calibration import kv_rows
from workbench.core.room import GIB, available
from workbench.core.texts import shipped_text
from workbench.engine.seams import AttentionOp
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.basis import Basis, Moments
from workbench.kv.kvtc.cross import Cross, CrossMoments
from workbench.kv.kvtc.distortion import Distortion, measure
from workbench.kv.kvtc.joint import JointRows
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress, check_cancel, part, report
from workbench.models.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.errors import ModelError, OptionError

SEQUENCES, LENGTH = 18, 1024
SINKS = 4  # first tokens of a sequence, far larger than any other
RANK = 3072  # components kept at least: what a ratio of 8 uses of 5,760 features
MOST = 10_240  # and at most, as the paper does
HELD_OUT = 8  # every eighth sequence
ROWS = 512  # held-out rows that errors are measured on
_VERSION = 1
_CROSS = ("weights", "k_scale", "v_scale")
_WHAT = "Calibrating KVTC"


@dataclass(frozen=True)
class _Seen:
    """Joint rows of keys and of values by sequence: fitted ones in float16, held-out ones in float32."""

    fitted: tuple[list[Tensor], list[Tensor]]
    held: tuple[list[Tensor], list[Tensor]]


def calibration_sequences(
    model: str, vocab: int, longest: int, tokenizer: Tokenizer | None = None
) -> tuple[str, list[list[int]]]:
    """What to calibrate on: its description, and at most 18 sequences of at most 1,024 token ids.

    As many as the shipped calibration text holds without overlap; random ids for a model without tokenizer.
    ``tokenizer`` is the model's, if it is loaded already.
    """
    length = min(LENGTH, longest)
    try:
        ids = (tokenizer or load_tokenizer(model)).encode(shipped_text("calibration"))
        text = "tokens of the shipped calibration text"
    except ModelError:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (SEQUENCES * length,), generator=generator).tolist()
        text = "random token ids (the model has no tokenizer)"
    sequences = cut_sequences(ids, length)
    return f"{len(sequences)} x {length} {text}", sequences


def cut_sequences(ids: Sequence[int], length: int = LENGTH) -> list[list[int]]:
    """At most 18 sequences of ``length`` ids, spread over ``ids`` without overlap; raises for too few ids."""
    count = min(SEQUENCES, len(ids) // length)
    if count < 2:
        raise OptionError(
            f"KVTC calibrates on at least 2 sequences of {length} tokens; the text has {len(ids):,} tokens.",
            hint="Give a longer calibration text.",
        )
    step = (len(ids) - length) // (count - 1)
    return [list(ids[i * step : i * step + length]) for i in range(count)]


def kvtc_calibration(
    decoder: Decoder,
    op: Callable[[], AttentionOp],
    *,
    model: str,
    weights: Sequence[str],
    text: tuple[str, list[list[int]]] | None = None,
    block: int | None = None,
    page_size: int = 64,
    tokenizer: Tokenizer | None = None,
    known: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Calibration:
    """The calibration of a decoder's weight set: from disk, or measured now (minutes).

    ``weights`` names the weight set, ``op`` makes an attention; ``text`` is what to calibrate on, its
    description and sequences of token ids (the shipped calibration text by default). ``block``: no component
    mixes more than so many features, which shows what joining them is worth. ``known``: only what is on disk
    will do. Raises :class:`PayloadError` when it is not, :class:`UnsupportedModel` for a model of
    sliding layers only, :class:`OptionError` without the memory for its moments, and ``Cancelled`` between
    two sequences or decompositions.
    """
    config = decoder.config
    joint = JointRows(config)
    origin, ids = text or calibration_sequences(model, config.vocab_size, config.max_position, tokenizer)
    rank = min(max(RANK, joint.features * 8 // 15), MOST)
    settings = (_VERSION, SINKS, rank, HELD_OUT, ROWS, str(decoder.weights.dtype), repr(config))
    apart = () if block is None else (f"blocks of {block}",)
    parts = (*map(str, settings), decoder.weights.fingerprint, *weights, origin, repr(ids), *apart)
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def make() -> Calibration:
        require_measuring("kvtc", known)
        _require_memory(joint.features)
        moments, seen = _run(decoder, op(), joint, ids, page_size, part(progress, 0.0, 0.5), cancel)
        tokens = moments[0].rows
        k = _side(moments, seen.held[0], rank, block, part(progress, 0.5, 0.7), cancel)
        v = _side(moments, seen.held[1], rank, block, part(progress, 0.7, 0.9), cancel)
        cross = _cross(k[0], v[0], seen, part(progress, 0.9, 1.0), cancel)
        return Calibration(k, v, cross, decoder.weights.fingerprint, joint.key, origin, tokens)

    return kept(f"kvtc-{digest}", _read, make, _write, cancel)


def _run(
    decoder: Decoder,
    op: AttentionOp,
    joint: JointRows,
    ids: Sequence[Sequence[int]],
    page_size: int,
    progress: Progress | None,
    cancel: Cancel | None,
) -> tuple[list[Moments], _Seen]:
    """Moments of keys and of values, and the rows."""
    moments = [Moments(joint.features), Moments(joint.features)]
    seen = _Seen(([], []), ([], []))
    every = min(HELD_OUT, len(ids))
    for i, sequence in enumerate(ids):
        check_cancel(cancel, _WHAT)
        rows = {layer: (k, v) for layer, k, v in kv_rows(decoder, op, sequence, page_size)}
        k, v = ([rows[layer][side].cpu() for layer in sorted(rows)] for side in range(2))
        for side, flat in enumerate((joint.keys(k, torch.arange(len(sequence))), joint.values(v))):
            check_cancel(cancel, _WHAT)
            if i % every == every - 1:
                seen.held[side].append(flat[SINKS:])
            else:
                moments[side].add(flat[SINKS:])
                seen.fitted[side].append(flat[SINKS:].half())
        report(progress, (i + 1) / len(ids), "running the model over calibration text")
    return moments, seen


def _side(
    moments: list[Moments],
    held: list[Tensor],
    rank: int,
    block: int | None,
    progress: Progress | None,
    cancel: Cancel | None,
) -> tuple[Basis, Distortion]:
    """Basis and errors of the first of ``moments``, which is taken off: p^2 numbers are not kept twice."""
    check_cancel(cancel, _WHAT)
    report(progress, 0.0, "finding the principal components")
    basis = moments.pop(0).basis(rank, block)
    check_cancel(cancel, _WHAT)
    report(progress, 0.8, "measuring errors of every format")
    rows = torch.cat(held)
    some = torch.linspace(0, len(rows) - 1, min(ROWS, len(rows)), dtype=torch.float32).long()
    distortion = measure(basis.project(rows[some]))
    report(progress, 1.0, "errors measured")
    return basis, distortion


def _cross(k: Basis, v: Basis, seen: _Seen, progress: Progress | None, cancel: Cancel | None) -> Cross:
    """Values from keys, fitted on the rows that the bases were fitted on."""
    moments = CrossMoments(k, v)
    for i, pair in enumerate(zip(*seen.fitted, strict=True)):
        check_cancel(cancel, _WHAT)
        moments.add(*(rows.float() for rows in pair))
        report(progress, i / len(seen.fitted[0]), "relating values to keys")
    found = moments.cross()
    report(progress, 1.0, "calibrated")
    return found


def _require_memory(features: int) -> None:
    """Two matrices of moments, what the decomposition of one takes beside it, and all rows in 16 bits."""
    needed = 6 * 8 * features**2 + 2 * 2 * SEQUENCES * LENGTH * features
    there = available("cpu")
    if needed > there:
        raise OptionError(
            f"Calibrating KVTC on {features:,} features takes {needed / GIB:,.1f} GiB; "
            f"{there / GIB:,.1f} GiB are available.",
            hint="Calibrate on a larger machine, or a smaller model.",
        )


def _read(path: Path) -> Calibration | None:
    """The artefact, or None when there is none that can be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            notes: dict[str, Any] = file.metadata()
            sides = []
            for side in "kv":
                get = {n: file.get_tensor(f"{side}.{n}") for n in ("mean", "components", "variance")}
                sizes = tuple(int(n) for n in file.get_tensor(f"{side}.sizes"))
                errors = (file.get_tensor(f"{side}.{n}") for n in ("energy", "error"))
                sides.append((Basis(**get, total=float(notes[f"{side}.total"])), Distortion(sizes, *errors)))
            cross = Cross(*(file.get_tensor(f"cross.{n}") for n in _CROSS))
            return Calibration(
                sides[0],
                sides[1],
                cross,
                notes["model"],
                notes["phases"],
                notes["origin"],
                int(notes["tokens"]),
            )
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return None


def _write(path: Path, found: Calibration) -> None:
    tensors: dict[str, Tensor] = {}
    notes = {n: str(getattr(found, n)) for n in ("model", "phases", "origin", "tokens")}
    for side, (basis, distortion) in (("k", found.k), ("v", found.v)):
        tensors |= {f"{side}.{n}": getattr(basis, n) for n in ("mean", "components", "variance")}
        tensors |= {f"{side}.{n}": getattr(distortion, n) for n in ("energy", "error")}
        tensors[f"{side}.sizes"] = torch.tensor(distortion.sizes)
        notes[f"{side}.total"] = repr(basis.total)
    tensors |= {f"cross.{n}": getattr(found.cross, n) for n in _CROSS}
    save_file(tensors, path, notes)
