"""Measures what it costs a model that layers share codes (XQuant), once per weight set, kept on disk.

Keys and values of calibration text are computed exactly; then one layer's, of one side, are replaced by what
the format would give back, with its own codes and with its partner's, and the tokens behind the context are
scored against the exact run. A model without a tokenizer is calibrated on random token ids, and the artefact
says so.
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
from workbench.core.quality_scores import kl_divergence
from workbench.core.texts import shipped_text
from workbench.core.xquant_trials import Trials
from workbench.engine.seams import AttentionOp
from workbench.kv.xquant.agreement import joint_counts, shuffled_tokens
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.harm import SharingHarm
from workbench.kv.xquant.schedule import Pair, pairs_of
from workbench.models.decoder import Decoder
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelError, OptionError

SEQUENCES, CONTEXT, SCORED = 3, 1024, 128
LEVELS = 4  # of the wider code
_VERSION = 1
_WHAT = "Calibrating xquant"


def sharing_sequences(model: str, vocab: int, longest: int, page: int) -> tuple[str, int, list[list[int]]]:
    """What to calibrate on: a description, tokens of context, and at most 3 sequences of token ids.

    The context is whole pages, 1,024 tokens or what the model has room for; at most 128 tokens behind it are
    scored. Raises :class:`OptionError` for a model whose context does not hold a page and a token to score.
    """
    context = min(CONTEXT, longest - 1) // page * page
    if context == 0:
        raise OptionError(
            f"xquant calibrates behind a page of {page} tokens, but the model has {longest} positions.",
            hint="Lower xquant.residual, or set xquant.schedule to none.",
        )
    length = min(context + SCORED, longest)
    try:
        ids = load_tokenizer(model).encode(shipped_text("calibration"))
        what = "tokens of the shipped calibration text"
    except ModelError:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (SEQUENCES * length,), generator=generator).tolist()
        what = "random token ids (the model has no tokenizer)"
    count = max(min(len(ids) // length, SEQUENCES), 1)
    step = (len(ids) - length) // max(count - 1, 1)
    sequences = [ids[i * step : i * step + length] for i in range(count)]
    return f"{count} x {length} {what}, the last {length - context} scored", context, sequences


def sharing_harm(
    decoder: Decoder,
    op: Callable[[], AttentionOp],
    codec: XQuantCodec,
    *,
    model: str,
    weights: Sequence[str],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> SharingHarm:
    """Harm and agreement of every pair of the codec's widths and grid: from disk, or measured now (a minute).

    ``weights`` names the weight set, ``op`` makes an attention. Raises ``Cancelled`` between two forwards.
    """
    config = decoder.config
    origin, context, ids = sharing_sequences(model, config.vocab_size, config.max_position, codec.residual)
    pairs = pairs_of(g.layers for g in config.kv_groups)
    settings = (
        _VERSION,
        codec.base.key,
        codec.eta1,
        codec.eta2,
        codec.group,
        codec.residual,
        codec.parameters,
    )
    identity = (decoder.weights.fingerprint, str(decoder.weights.dtype), repr(config), *weights)
    parts = (*map(repr, settings), *identity, origin, repr(ids))
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def make() -> SharingHarm:
        return _measure(decoder, op(), codec, pairs, ids, context, origin, progress, cancel)

    return kept(f"xquant-{digest}", lambda path: _read(path, pairs), make, _write, cancel)


def _measure(
    decoder: Decoder,
    op: AttentionOp,
    codec: XQuantCodec,
    pairs: tuple[Pair, ...],
    ids: Sequence[Sequence[int]],
    context: int,
    origin: str,
    progress: Progress | None,
    cancel: Cancel | None,
) -> SharingHarm:
    n = len(pairs)
    kl = {name: torch.zeros(2, n, dtype=torch.float64) for name in ("shared", "own")}
    counts = torch.zeros(2, 2, n, LEVELS, LEVELS, dtype=torch.int64)
    tokens = 0
    for s, sequence in enumerate(ids):
        check_cancel(cancel, _WHAT)
        trials = Trials(decoder, op, codec, sequence, context)
        tokens += len(sequence) - context
        for i, pair in enumerate(pairs):
            counts[:, :, i] += _counts(trials, pair)
        for done, (side, i, name, log_q) in enumerate(_trials(trials, pairs), 1):
            check_cancel(cancel, _WHAT)
            kl[name][side, i] += float(kl_divergence(trials.exact, log_q).sum())
            report(progress, (s + done / (4 * n)) / len(ids), "calibrating which layers share codes")
    report(progress, 1.0, "calibrated")
    return SharingHarm(pairs, kl["shared"] / tokens, kl["own"] / tokens, counts[0], counts[1], origin, tokens)


def _trials(trials: Trials, pairs: Sequence[Pair]) -> Iterator[tuple[int, int, str, Tensor]]:
    for side in range(2):
        for i, (first, second) in enumerate(pairs):
            yield side, i, "shared", trials.score(side, second, first)
            yield side, i, "own", trials.score(side, second, None)


def _counts(trials: Trials, pair: Pair) -> Tensor:
    """Code pairs int64 [2, 2, 4, 4]: as they are and with tokens shuffled, keys and values; a narrower code
    of the second layer is taken at its partner's width, as sharing would."""
    first, second = (trials.codes(layer, like=pair[0]) for layer in pair)
    out = torch.zeros(2, 2, LEVELS, LEVELS, dtype=torch.int64)
    for side in range(2):
        a, b = first[side], second[side]
        out[0, side] = joint_counts(a, b, LEVELS)
        out[1, side] = joint_counts(a, shuffled_tokens(b, seed=pair[1]), LEVELS)
    return out


def _read(path: Path, pairs: tuple[Pair, ...]) -> SharingHarm | None:
    """The artefact, or None when there is none that can be read: of these pairs, all numbers finite."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            notes: dict[str, Any] = file.metadata()
            found = SharingHarm(
                tuple((int(a), int(b)) for a, b in file.get_tensor("pairs")),
                **{n: file.get_tensor(n) for n in ("shared", "own", "joint", "shuffled")},
                origin=notes["origin"],
                tokens=int(notes["tokens"]),
            )
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return None
    kl, counts = (2, len(pairs)), (2, len(pairs), LEVELS, LEVELS)
    shapes = (found.shared.shape, found.own.shape, found.joint.shape, found.shuffled.shape)
    whole = found.pairs == pairs and shapes == (kl, kl, counts, counts)
    return found if whole and all(bool(t.isfinite().all()) for t in (found.shared, found.own)) else None


def _write(path: Path, found: SharingHarm) -> None:
    tensors = {n: getattr(found, n).contiguous() for n in ("shared", "own", "joint", "shuffled")}
    tensors["pairs"] = torch.tensor(found.pairs, dtype=torch.int64).reshape(-1, 2)
    save_file(tensors, path, {"origin": found.origin, "tokens": str(found.tokens)})
