"""Prompt lookup: draft what followed the last few tokens the last time they occurred.

Saxena, Prompt Lookup Decoding (2023). The longest n-gram that ends the sequence and occurs earlier
wins, n from ``max_n`` down to ``min_n``; its followers are the draft. No model, no KV: it pays where output
copies from the context (summaries, edits, retrieval) and costs verification rows elsewhere. Drafts are
deterministic, so they are judged by R1 or R3, and only ids of the sequence itself are ever proposed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Options of ``ngram``; the defaults are those of the original implementation."""

    k: int = option(10, low=1, high=64, unit="tokens", help="Tokens drafted at most per step.")
    min_n: int = option(1, low=1, high=16, unit="tokens", help="Shortest n-gram that is looked up.")
    max_n: int = option(3, low=1, high=16, unit="tokens", help="Longest n-gram, tried first.")
    match: str = option(
        "latest",
        choices=("latest", "first"),
        help="Which earlier occurrence is copied: most recent or oldest.",
    )


SPEC = TechniqueSpec(
    id="ngram",
    title="N-gram lookup",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary="Drafts by copying what followed the current n-gram earlier in the sequence; free to propose, "
    "useful only where output repeats its context.",
    paper="https://github.com/apoorvumang/prompt-lookup-decoding",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    claims=(
        Claim(
            "2.4x faster decoding on average",
            "summarisation and context question answering, Mistral-7B, A100, greedy, max_n 3, k 10",
            "https://github.com/apoorvumang/prompt-lookup-decoding",
        ),
        Claim(
            "ShareGPT 76 to 91, HumanEval 77 to 100, SWE-bench 76 to 175 tokens/s",
            "vLLM 0.8.4 without drafts against its n-gram drafter, documentation of Arctic Inference",
            "https://github.com/snowflakedb/ArcticInference",
        ),
    ),
)


class NgramIndex:
    """Where each n-gram of one sequence ended; O(max_n) per appended id, O(max_n) per look-up.

    An n-gram is entered when the id after it arrives, so every entry has a follower and the n-gram that
    ends the sequence never finds itself. Occurrences may overlap it: 7 7 7 drafts 7.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._key_bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append committed ids."""
        keep_first = self._config.match == "first"
        for token in ids:
            end = len(self._ids)  # ids[:end] is followed by ``token``
            for n in range(self._config.min_n, min(self._config.max_n, end) + 1):
                key = tuple(self._ids[end - n :])
                if key not in self._ends:
                    self._key_bytes += sys.getsizeof(key) + sys.getsizeof(end)
                elif keep_first:
                    continue
                self._ends[key] = end
            self._ids.append(token)

    def followers(self, limit: int) -> list[int]:
        """Up to ``limit`` ids that followed the longest n-gram found; empty when none occurs earlier."""
        for n in range(min(self._config.max_n, len(self._ids) - 1), self._config.min_n - 1, -1):
            end = self._ends.get(tuple(self._ids[-n:]))
            if end is not None:
                return self._ids[end : end + limit]
        return []

    def nbytes(self) -> int:
        """Bytes of the table, its keys and positions, and the list of ids (the ids are shared objects)."""
        return sys.getsizeof(self._ids) + sys.getsizeof(self._ends) + self._key_bytes


class NgramDrafter:
    """The ``drafter`` seam: one index per live sequence; raises :class:`InvariantError` on unknown ones."""

    name = "ngram"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.max_draft = config.k
        self._indexes: dict[int, NgramIndex] = {}

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """Index the prompt, or after a preemption everything committed, from scratch."""
        index = NgramIndex(self.config)
        index.extend(tokens)
        self._indexes[seq] = index

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """A chain of at most ``min(k, room)`` ids per context, None where nothing matches."""
        out: list[DraftTree | None] = []
        for context in contexts:
            index = self._index(context.seq)
            if len(index) != len(context.tokens):
                seen = f"{len(index)} of {len(context.tokens)} committed ids"
                raise InvariantError(f"ngram has seen {seen} of sequence {context.seq}.")
            ids = index.followers(min(self.config.k, context.room)) if context.room > 0 else []
            out.append(DraftTree.chain(ids, self.name) if ids else None)
        return out

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Append what the step committed."""
        self._index(seq).extend(tokens)

    def forget(self, seq: int) -> None:
        """Free the sequence's index."""
        self._indexes.pop(seq, None)

    def nbytes(self) -> int:
        """Bytes of all indexes."""
        return sum(index.nbytes() for index in self._indexes.values())

    def _index(self, seq: int) -> NgramIndex:
        if seq not in self._indexes:
            raise InvariantError(f"ngram was never told that sequence {seq} began.")
        return self._indexes[seq]


def bind(config: Config, context: Any = None) -> NgramDrafter:
    """The drafter; raises :class:`OptionError` when the n-gram lengths cross."""
    if config.min_n > config.max_n:
        raise OptionError(
            f"ngram.min_n = {config.min_n} is above ngram.max_n = {config.max_n}.",
            hint="Choose min_n of at most max_n.",
        )
    return NgramDrafter(config)
