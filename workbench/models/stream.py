"""Incremental detokenization: text as tokens arrive, never half a character.

A character may span tokens and a token may end inside one, so tokens cannot be decoded one by one.
The two decoders in use are followed exactly, so that the pieces join to ``decode`` of all ids:
byte-level BPE through an incremental UTF-8 decoder, SentencePiece byte fallback through its runs
of byte tokens. Any other decoder is run on a short window of recent tokens.

Work per token is constant; a piece may come from one token or from a whole accepted block.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_CONTEXT = 6  # tokens kept in front of the window: how far a decoder's view of its neighbours reaches


class Pieces(Protocol):
    """The decoding rule of one tokenizer, fed with token texts (special ones already left out)."""

    def push(self, token: str, token_id: int) -> str:
        """Text that is now certain."""
        ...

    def finish(self) -> str:
        """Text of what is still held back, replacement marks included: no more tokens come."""
        ...


class StreamDecoder:
    """Decodes a growing sequence of ids. One per sequence; ``finish`` ends it.

    ``skip_special`` leaves out special tokens, as in ``Tokenizer.decode``.
    """

    def __init__(self, backend: tokenizers.Tokenizer, skip_special: bool = True) -> None:
        self._token = backend.id_to_token
        added = backend.get_added_tokens_decoder().items()
        self._skip = frozenset(i for i, t in added if t.special) if skip_special else frozenset()
        self._pieces = _pieces(backend)

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete, possibly empty; incomplete characters wait for their rest."""
        return "".join(self._pieces.push(token, i) for i in ids if (token := self._known(i)) is not None)

    def finish(self) -> str:
        """The rest. All pieces together equal ``decode`` of all ids."""
        return self._pieces.finish()

    def _known(self, token_id: int) -> str | None:
        return None if token_id in self._skip else self._token(token_id)


def _pieces(backend: tokenizers.Tokenizer) -> Pieces:
    # The decoder's own JSON: that of the whole tokenizer takes a fifth of a second for a large vocabulary.
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
    steps: list[dict[str, Any]] = (decoder or {}).get("decoders") or ([decoder] if decoder else [])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelPieces()
    strip = steps[-1] if kinds and kinds[-1] == "Strip" else None
    replaces = [step for step in steps if step["type"] == "Replace"]
    expected = ["Replace"] * len(replaces) + ["ByteFallback", "Fuse"] + (["Strip"] if strip else [])
    plain = all("String" in step["pattern"] for step in replaces)
    if kinds == expected and plain and (strip is None or strip["stop"] == 0):
        pairs = [(step["pattern"]["String"], step["content"]) for step in replaces]
        return ByteFallbackPieces(pairs, strip["content"] if strip else "", strip["start"] if strip else 0)
    return WindowPieces(lambda ids: backend.decode(ids, skip_special_tokens=False))


def token_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How the tokens of a vocabulary spell bytes: what a token stands for inside a text."""
    pieces = _pieces(backend)
    if isinstance(pieces, ByteLevelPieces):
        return byte_level_bytes
    return pieces.bytes_of if isinstance(pieces, ByteFallbackPieces) else str.encode


class ByteLevelPieces:
    """Byte-level BPE: tokens are bytes in a printable alphabet; text is their UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str, token_id: int) -> str:
        """Text that is now certain."""
        return self._utf8.decode(byte_level_bytes(token))

    def finish(self) -> str:
        """An unfinished character becomes a replacement mark."""
        return self._utf8.decode(b"", final=True)


class ByteFallbackPieces:
    """SentencePiece: tokens are text, except ``<0xAB>`` runs, valid as a whole or replaced as a whole."""

    def __init__(self, replace: list[tuple[str, str]], strip: str, start: int) -> None:
        self._replace, self._strip, self._left = replace, strip, start
        self._run = bytearray()

    def push(self, token: str, token_id: int) -> str:
        """Text that is now certain: nothing inside a run of byte tokens, which is judged at its end."""
        for old, new in self._replace:
            token = token.replace(old, new)
        if match := _BYTE_TOKEN.match(token):
            self._run.append(int(match[1], 16))
            return ""
        return self._strip_start(self._end_run() + token)

    def finish(self) -> str:
        """The last run of byte tokens."""
        return self._strip_start(self._end_run())

    def bytes_of(self, token: str) -> bytes:
        """What a token stands for inside a text."""
        for old, new in self._replace:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.match(token)
        return bytes([int(match[1], 16)]) if match else token.encode()

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip_start(self, text: str) -> str:
        while text and self._left and text.startswith(self._strip):
            text, self._left = text[len(self._strip) :], self._left - 1
        if text:
            self._left = 0
        return text


class WindowPieces:
    """Any other decoder: decode recent tokens with and without the new ones, emit the difference."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._emitted = 0  # ids of the window whose text is out already

    def push(self, token: str, token_id: int) -> str:
        """The new text, unless it ends in a character that may still be completed."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) - self._emitted < _CONTEXT:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        """The rest of the window."""
        return self._emit(self._decode(self._ids)) if self._emitted < len(self._ids) else ""

    def _emit(self, text: str) -> str:
        piece = text[len(self._decode(self._ids[: self._emitted])) :]
        self._ids = self._ids[-_CONTEXT:]
        self._emitted = len(self._ids)
        return piece


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with any character outside the alphabet is plain text."""
    try:
        return bytes(_BYTES[c] for c in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 byte values (``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
