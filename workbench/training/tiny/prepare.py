"""From the unpacked packages to token streams, once; the result is cached in the work folder.

The training stream is all training documents plus their chat samples; the held-out stream
is the held-out documents alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from workbench.training.corpus import Document, Source, read_documents, read_sources
from workbench.training.corpus.chat import chat_texts
from workbench.training.corpus.held_out_text import write_eval_text
from workbench.training.corpus.prompts import write_prompts
from workbench.training.tiny.data import Windows, encode_stream
from workbench.training.tiny.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Corpus:
    """Everything a run reads: tokenizer, two token streams, and what they were made from."""

    tokenizer: Tokenizer
    windows: Windows
    held_out: np.ndarray
    sources: tuple[Source, ...]
    facts: dict[str, float]

    @property
    def fingerprint(self) -> str:
        """Hash of the training stream, 16 hexadecimal digits."""
        return hashlib.sha256(self.windows.stream.tobytes()).hexdigest()[:16]

    def held_out_windows(self, count: int = 24, length: int = 512) -> Tensor:
        """Fixed evenly spread held-out windows, int64 ``[count, length]``."""
        return Windows(self.held_out, seed=1).batch(0, count, length)


def prepare(work: Path, seed: int) -> Corpus:
    """Read, tokenize and cache the corpus of ``work/sources``.

    Raises MissingSource if the packages are not there.
    """
    cache = work / "corpus"
    if not (cache / "facts.json").is_file():
        _write(cache, work / "sources", seed)
    facts = json.loads((cache / "facts.json").read_text())
    return Corpus(
        tokenizer=Tokenizer.from_file(str(cache / "tokenizer.json")),
        windows=Windows(np.load(cache / "train.npy", allow_pickle=False), seed),
        held_out=np.load(cache / "held_out.npy", allow_pickle=False),
        sources=tuple(Source(**row) for row in facts.pop("sources")),
        facts=facts,
    )


def write_data(work: Path, data: Path, corpus: Corpus, seed: int) -> None:
    """Write the evaluation text and the prompts of the held-out documents below ``data``."""
    documents = read_documents(work / "sources")
    write_eval_text(data / "text", documents, corpus.sources)
    write_prompts(data / "prompts", documents, seed)


def _write(cache: Path, packages: Path, seed: int) -> None:
    documents = read_documents(packages)
    seen = [document for document in documents if not document.held_out]
    unseen = [document for document in documents if document.held_out]
    chats = list(chat_texts(seen, seed))
    tokenizer = train_tokenizer(_texts(seen, chats))
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(cache / "tokenizer.json"))
    train = encode_stream(tokenizer, _texts(seen, chats))
    held_out = encode_stream(tokenizer, _texts(unseen, []))
    np.save(cache / "train.npy", train, allow_pickle=False)
    np.save(cache / "held_out.npy", held_out, allow_pickle=False)
    facts = {
        "documents": len(documents),
        "held_out_documents": len(unseen),
        "chat_samples": len(chats),
        "train_bytes": sum(len(text.encode()) for text in _texts(seen, chats)),
        "chat_bytes": sum(len(text.encode()) for text in chats),
        "held_out_bytes": sum(len(document.text.encode()) for document in unseen),
        "train_tokens": len(train),
        "held_out_tokens": len(held_out),
        "sources": [asdict(source) for source in read_sources(packages, documents)],
    }
    (cache / "facts.json").write_text(json.dumps(facts, indent=1))


def _texts(documents: list[Document], chats: list[str]) -> Iterator[str]:
    yield from (document.text for document in documents)
    yield from chats
