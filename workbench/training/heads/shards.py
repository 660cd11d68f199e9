"""Training data on disk: conversations in shards, and beside each what a head is shown of them.

A shard appears whole or not at all and is a pure function of the model, the settings and its number, so
making data may be stopped at any moment, goes on where it stopped, and more can be asked for later. The first
shards are held out: no head is trained on them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from workbench.models.cache import cache_dir
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.spec.errors import StorageError
from workbench.spec.plan import EngineLimits
from workbench.training.errors import TrainingError
from workbench.training.heads.capture import capture
from workbench.training.heads.conversations import Conversation, Making, converse, opening
from workbench.training.heads.openings import KINDS, WEIGHTS
from workbench.training.heads.target import Target

_VERSION = 1
HELD_OUT = 1
"""Shards at the beginning that are held out."""
FRUITLESS = 4
"""Shards in a row without a single answer, after which no more are asked for."""


@dataclass(frozen=True)
class DataSettings:
    """``tokens``: answer tokens to train on, at least; ``questions`` per shard, two answers each.

    ``whole``: questions are learnt from as well; the model made them too.
    """

    tokens: int = 100_000
    questions: int = 48
    making: Making = field(default_factory=Making)
    whole: bool = False

    def key(self, fingerprint: str) -> str:
        """Names the shards that these settings make, not how many are wanted or what of them is learnt."""
        openings = (KINDS, WEIGHTS) if self.making.opened else ()
        shaping = (_VERSION, fingerprint, self.questions, sorted(asdict(self.making).items()), *openings)
        return hashlib.blake2b(repr(shaping).encode(), digest_size=8).hexdigest()


class Shards:
    """The shards of one target and one choice of settings."""

    def __init__(self, target: Target, settings: DataSettings, folder: Path | None = None) -> None:
        self.target = target
        self.settings = settings
        plan = target.plan
        made_by = f"{target.source.fingerprint} {plan.dtype} {plan.numerics} {plan.recipe.key}"
        self.key = settings.key(made_by)
        name = f"{Path(plan.model).name}-{self.key}"
        self.folder = folder if folder is not None else cache_dir() / "training" / name

    def conversations(
        self, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> list[list[Conversation]]:
        """All shards that are needed, made where they are not there yet.

        Raises ``Cancelled`` within an engine step, :class:`StorageError` where nothing can be written, and
        :class:`TrainingError` for a model that goes on saying nothing.
        """
        out: list[list[Conversation]] = []
        tokens = 0
        while tokens < self.settings.tokens or len(out) <= HELD_OUT:
            shard = self._conversations(len(out), cancel)
            out.append(shard)
            if len(out) >= FRUITLESS and not any(out[-FRUITLESS:]):
                raise TrainingError(
                    f"The model answered none of {FRUITLESS * self.settings.questions} questions.",
                    hint="Its answers are empty or run in circles; train on a model that talks.",
                )
            if len(out) > HELD_OUT:
                tokens += sum(len(c.ids) - c.answer for c in shard)
            report(progress, tokens / self.settings.tokens, f"{tokens:,} tokens made")
        return out

    def streams(
        self,
        number: int,
        conversations: list[Conversation],
        layers: Sequence[int],
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> list[Tensor]:
        """bfloat16 [rows, H] for each of ``layers``: its stream at every token of every conversation.

        Each layer has a file of its own, mapped and not read; those that lack one are captured together.
        """
        rows = sum(len(c.ids) for c in conversations)
        names = {layer: f"stream-{layer}-{number:05}" for layer in layers}
        missing = [layer for layer in names if self._stream(names[layer], rows) is None]
        if missing:
            texts = [c.ids for c in conversations]
            pieces: dict[int, list[Tensor]] = {layer: [] for layer in missing}
            shown = capture(self.target.decoder, self.target.attention(), texts, missing)
            for n, streams in enumerate(shown):
                check_cancel(cancel, "Capturing hidden states")
                for layer, stream in zip(missing, streams, strict=True):
                    pieces[layer].append(stream.to(torch.bfloat16).clone())
                report(progress, (n + 1) / len(texts), f"hidden states of shard {number}")
            for layer in missing:
                self._write(names[layer], {"stream": torch.cat(pieces[layer])})
        found = [self._stream(names[layer], rows) for layer in layers]
        return [stream for stream in found if stream is not None]

    def _stream(self, name: str, rows: int) -> Tensor | None:
        found = _read(self.folder / f"{name}.safetensors")
        stream = None if found is None else found.get("stream")
        return stream if stream is not None and stream.shape[:1] == (rows,) else None

    def best(self, number: int, conversations: list[Conversation], stream: Tensor) -> Tensor:
        """int32 [rows]: the model's likeliest token behind each token of the answers, -1 behind others.

        Greedy answers say it themselves, but for what follows their last token; where another was drawn it is
        worked out from ``stream``, which is what leaves the last layer.
        """
        name = f"best-{number:05}"
        found = _read(self.folder / f"{name}.safetensors")
        if found is not None and found.get("best", torch.empty(0)).shape == stream.shape[:1]:
            return found["best"]
        best = torch.cat([_said(c) for c in conversations])
        drawn = [(torch.arange(len(c.ids)) >= c.answer) & (not c.greedy) for c in conversations]
        decoder = self.target.decoder
        with torch.inference_mode():
            for rows in torch.split(torch.cat(drawn).nonzero()[:, 0], 512):
                hidden = decoder.final_norm(stream[rows].to(decoder.weights.residual_dtype))
                best[rows] = decoder.logits(hidden).argmax(-1).to(torch.int32)
        self._write(name, {"best": best})
        return best

    def _conversations(self, number: int, cancel: Cancel | None) -> list[Conversation]:
        name = f"shard-{number:05}"
        found = _read(self.folder / f"{name}.safetensors")
        if found is not None:
            with contextlib.suppress(KeyError, RuntimeError, ValueError):
                return _unpack(found)
        settings, making = self.settings, self.settings.making
        count = settings.questions
        begin = len(opening(self.target.tokenizer))
        longest = min(begin + making.longest_question + making.answer, self.target.source.config.max_position)
        usual = begin + 64 + 2 * making.question + making.answer
        pool = 2 * count * -(-min(usual, longest) // 64) * 64  # what does not fit at once waits
        pool = max(pool, -(-longest // 64) * 64)
        limits = EngineLimits(kv_pool_tokens=pool, max_sequences=2 * count, max_context=longest)
        with self.target.engine(limits=limits) as engine:
            made = converse(engine, self.target.tokenizer, number * count, count, making, cancel)
        self._write(name, _pack(made))
        return made

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = self.folder / f"{name}.safetensors"
        unfinished = path.with_suffix(f".{os.getpid()}.part")  # another process may make the same
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(tensors), unfinished)
            unfinished.replace(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise StorageError(
                f"Training data cannot be written to {self.folder}: {error}.",
                hint="Set WORKBENCH_CACHE to a folder with room.",
            ) from None


def _read(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a file, or None when there is none that can be read."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, safetensors.SafetensorError):
        return None


def _said(conversation: Conversation) -> Tensor:
    """The token behind each one of the answer, -1 behind the last and behind the prompt's."""
    said = torch.full((len(conversation.ids),), -1, dtype=torch.int32)
    said[conversation.answer : -1] = torch.tensor(conversation.ids[conversation.answer + 1 :])
    return said


def _pack(conversations: list[Conversation]) -> dict[str, Tensor]:
    return {
        "ids": torch.tensor([i for c in conversations for i in c.ids], dtype=torch.int32),
        "lengths": torch.tensor([len(c.ids) for c in conversations], dtype=torch.int32),
        "answers": torch.tensor([c.answer for c in conversations], dtype=torch.int32),
        "greedy": torch.tensor([c.greedy for c in conversations], dtype=torch.bool),
    }


def _unpack(tensors: Mapping[str, Tensor]) -> list[Conversation]:
    pieces = torch.split(tensors["ids"], tensors["lengths"].tolist())
    rows = zip(pieces, tensors["answers"].tolist(), tensors["greedy"].tolist(), strict=True)
    return [Conversation(tuple(ids.tolist()), answer, greedy) for ids, answer, greedy in rows]
