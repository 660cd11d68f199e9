"""Training data on disk: conversations in shards, and beside each what a head is shown of them.

A shard appears whole or not at all and is a pure function of the model, the settings and its number, so
making data may be stopped at any moment, goes on where it stopped, and more can be asked for later. The first
shards are held out: no head is trained on them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
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
from workbench.training.heads.target import Target

_VERSION = 1
HELD_OUT = 1
"""Shards at the beginning that are held out."""
FRUITLESS = 4
"""Shards in a row without a single answer, after which no more are asked for."""


@dataclass(frozen=True)
class DataSettings:
    """``tokens``: answer tokens to train on, at least; ``questions`` per shard, two answers each."""

    tokens: int = 100_000
    questions: int = 48
    making: Making = field(default_factory=Making)

    def key(self, fingerprint: str) -> str:
        """Names the shards that these settings make; how many are wanted is not part of it."""
        shaping = (_VERSION, fingerprint, self.questions, sorted(asdict(self.making).items()))
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

    def features(
        self,
        number: int,
        conversations: list[Conversation],
        layer: int,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Tensor:
        """bfloat16 [rows, H]: the stream of ``layer`` at the last token of each prompt and at its answer."""
        name = f"features-{layer}-{number:05}"
        found = _read(self.folder / f"{name}.safetensors")
        rows = sum(len(c.ids) - c.answer + 1 for c in conversations)
        if found is not None and found.get("stream", torch.empty(0)).shape[:1] == (rows,):
            return found["stream"]
        pieces: list[Tensor] = []
        texts = [c.ids for c in conversations]
        streams = capture(self.target.decoder, self.target.attention(), texts, (layer,))
        for c, (stream,) in zip(conversations, streams, strict=True):
            check_cancel(cancel, "Capturing hidden states")
            pieces.append(stream[c.answer - 1 :].to(torch.bfloat16))
            report(progress, len(pieces) / len(texts), f"hidden states of shard {number}")
        made = torch.cat(pieces).clone()
        self._write(name, {"stream": made})
        return made

    def _conversations(self, number: int, cancel: Cancel | None) -> list[Conversation]:
        name = f"shard-{number:05}"
        found = _read(self.folder / f"{name}.safetensors")
        if found is not None:
            with contextlib.suppress(KeyError, RuntimeError, ValueError):
                return _unpack(found)
        settings, making = self.settings, self.settings.making
        count = settings.questions
        begin = len(opening(self.target.tokenizer))
        longest = min(
            begin + 64 + 2 * making.question + making.answer, self.target.source.config.max_position
        )
        pool = 2 * count * -(-longest // 64) * 64  # what does not fit at once waits
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
