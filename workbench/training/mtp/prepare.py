"""The corpus of the small model: the interpreter's own standard library, which needs no download."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from workbench.training.corpus import Source, read_library_source, read_standard_library
from workbench.training.mtp.model import VOCAB_SIZE
from workbench.training.tiny.data import Windows, encode_stream
from workbench.training.tiny.prepare import Corpus
from workbench.training.tiny.tokenizer import END_OF_TEXT, SPECIALS, train_tokenizer


def prepare(work: Path, seed: int) -> Corpus:
    """Read, tokenize and cache the corpus in ``work``."""
    cache = work / "corpus"
    if not (cache / "facts.json").is_file():
        _write(cache)
    facts = json.loads((cache / "facts.json").read_text())
    return Corpus(
        tokenizer=Tokenizer.from_file(str(cache / "tokenizer.json")),
        windows=Windows(np.load(cache / "train.npy", allow_pickle=False), seed),
        held_out=np.load(cache / "held_out.npy", allow_pickle=False),
        sources=tuple(Source(**row) for row in facts.pop("sources")),
        facts=facts,
    )


def _write(cache: Path) -> None:
    documents = read_standard_library()
    seen = [document.text for document in documents if not document.held_out]
    unseen = [document.text for document in documents if document.held_out]
    tokenizer = train_tokenizer(seen, VOCAB_SIZE, SPECIALS[: END_OF_TEXT + 1])
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(cache / "tokenizer.json"))
    train, held_out = encode_stream(tokenizer, seen), encode_stream(tokenizer, unseen)
    np.save(cache / "train.npy", train, allow_pickle=False)
    np.save(cache / "held_out.npy", held_out, allow_pickle=False)
    facts = {
        "documents": len(documents),
        "held_out_documents": len(unseen),
        "train_bytes": sum(len(text.encode()) for text in seen),
        "held_out_bytes": sum(len(text.encode()) for text in unseen),
        "train_tokens": len(train),
        "held_out_tokens": len(held_out),
        "sources": [asdict(read_library_source(documents))],
    }
    (cache / "facts.json").write_text(json.dumps(facts, indent=1))
