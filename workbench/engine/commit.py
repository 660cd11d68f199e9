"""Making tokens final: cut at EOS, stop strings and budgets, streamed text that is never taken back.

A block of several accepted tokens is committed one by one, so that whatever ends a request ends it
at exactly that token, whether it was drafted or not; what lies behind it is dropped.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workbench.engine.sequence import Sequence
from workbench.spec.events import TokenInfo


@dataclass(frozen=True)
class Committed:
    """Tokens one sequence gained, the text that became final with them, and how many were kept."""

    infos: tuple[TokenInfo, ...]
    text: str

    @property
    def kept(self) -> int:
        """Number of tokens committed."""
        return len(self.infos)


def commit_tokens(seq: Sequence, infos: Seq[TokenInfo], eos_ids: Collection[int]) -> Committed:
    """Append tokens to the sequence until one of them ends it; sets ``seq.finish`` when that happens."""
    kept: list[TokenInfo] = []
    text = ""
    for info in infos:
        seq.tokens.append(info.id)
        seq.infos.append(info)
        kept.append(info)
        piece, stopped = _feed(seq, info.id)
        text += piece
        if stopped or (info.id in eos_ids and not seq.params.ignore_eos):
            seq.finish = "stop"
        elif seq.left <= 0:
            seq.finish = "length"
        if seq.finish is not None:
            text += flush_text(seq, stopped=stopped)
            break
    seq.text += text
    return Committed(tuple(kept), text)


def flush_text(seq: Sequence, *, stopped: bool = False) -> str:
    """Text still held back when a sequence ends; nothing after a stop string."""
    if seq.stream is None or stopped:
        return ""
    piece = seq.stream.finish()
    if seq.stops is None:
        return piece
    out, hit = seq.stops.feed(piece)
    return out if hit else out + seq.stops.flush()


def _feed(seq: Sequence, token: int) -> tuple[str, bool]:
    if seq.stream is None:
        return "", False
    piece = seq.stream.push([token])
    if seq.stops is None:
        return piece, False
    return seq.stops.feed(piece)
