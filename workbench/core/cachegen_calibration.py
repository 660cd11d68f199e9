"""CacheGen's probability tables of a model: measured once per weight set, and remembered on disk.

The model is run plainly over calibration text, once, and the symbols of its keys and values are counted in
every alphabet that the wanted levels use. The artefact says on what text. A model without a tokenizer is
calibrated on random token ids, and the artefact says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from workbench.core.artefacts import kept, require_measuring
from workbench.core.kv_calibration import kv_rows
from workbench.core.texts import shipped_text
from workbench.engine.seams import AttentionOp
from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.calibrate import TableRecorder
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import LEVELS, Alphabet, Level, alphabets
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.errors import ModelError

SEQUENCES = 16
LENGTH = 1024
_VERSION = 1


def cachegen_artefact(
    decoder: Decoder,
    op: Callable[[], AttentionOp],
    *,
    model: str,
    weights: Sequence[str],
    levels: tuple[Level, ...] = LEVELS,
    text: tuple[str, Sequence[Sequence[int]]] | None = None,
    page_size: int = 64,
    tokenizer: Tokenizer | None = None,
    known: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Artefact:
    """The tables of ``levels``: from disk, or measured now.

    ``weights`` names the weight set, ``op`` makes an attention. ``text`` is a description and token ids to
    calibrate on instead of the shipped calibration text; ``tokenizer`` is the model's, if it is loaded.
    ``known``: only what is on disk will do. Raises :class:`PayloadError` when it is not, and ``Cancelled``
    between two sequences.
    """
    config = decoder.config
    origin, ids = text if text is not None else _ids(model, config.vocab_size, config.max_position, tokenizer)
    wanted, fingerprint = alphabets(levels), decoder.weights.fingerprint
    layout = Layout(config)
    identity = (str(_VERSION), fingerprint, repr(config), layout.key, *weights)
    parts = (*identity, repr(wanted), origin, repr(ids))
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def make() -> Artefact:
        require_measuring("cachegen", known)
        recorder = TableRecorder(layout, wanted)
        for i, sequence in enumerate(ids):
            check_cancel(cancel, "Calibrating cachegen")
            for layer, k, v in kv_rows(decoder, op(), sequence, page_size):
                recorder.add(layer, k, v)
            report(progress, (i + 1) / len(ids), "calibrating cachegen")
        return recorder.artefact(fingerprint, origin)

    return kept(f"cachegen-{digest}", lambda path: _read(path, wanted), make, _write, cancel)


def _ids(model: str, vocab: int, longest: int, tokenizer: Tokenizer | None) -> tuple[str, list[list[int]]]:
    """What to calibrate on: as many whole sequences as the shipped text has, at most 16."""
    length = min(LENGTH, longest)
    try:
        ids = (tokenizer or load_tokenizer(model)).encode(shipped_text("calibration"))
        count = max(min(len(ids) // length, SEQUENCES), 1)
        origin = f"{count} x {length} tokens of the shipped calibration text"
    except ModelError:
        generator = np.random.default_rng(0)
        count = 4
        ids = generator.integers(0, vocab, count * length).tolist()
        origin = f"{count} x {length} random token ids (the model has no tokenizer)"
    return origin, [ids[i * length : (i + 1) * length] for i in range(count)]


def _read(path: Path, wanted: tuple[Alphabet, ...]) -> Artefact | None:
    """The artefact, or None when there is none that can be read."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            notes: dict[str, str] = file.metadata()
            tables = {a: file.get_tensor(a.name) for a in wanted}
            return Artefact(tables, notes["model"], notes["layout"], notes["origin"], int(notes["tokens"]))
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return None


def _write(path: Path, artefact: Artefact) -> None:
    notes = {
        "model": artefact.model,
        "layout": artefact.layout,
        "origin": artefact.origin,
        "tokens": str(artefact.tokens),
    }
    save_file({a.name: t for a, t in artefact.tables.items()}, path, notes)
