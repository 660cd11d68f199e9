"""Stored KV is refused, by name and place, whatever happened to its bytes."""

from __future__ import annotations

import zlib

import pytest

from workbench.kv.container import START, read_payload, write_payload
from workbench.spec.errors import PayloadError

STREAMS = {"codes": bytes(range(200)), "empty": b"", "scales": b"\x01\x02"}
DATA = write_payload("toy", 3, {"tokens": 7, "list": [1, 2]}, STREAMS)


def test_what_was_written_is_read():
    payload = read_payload(DATA, "toy", 3)
    assert payload.header == {"tokens": 7, "list": [1, 2]}
    assert {n: bytes(s) for n, s in payload.streams.items()} == STREAMS
    assert write_payload("toy", 3, {"list": [1, 2], "tokens": 7}, STREAMS) == DATA


def test_every_truncation_is_refused():
    for n in range(len(DATA)):
        with pytest.raises(PayloadError):
            read_payload(DATA[:n], "toy", 3)
    with pytest.raises(PayloadError, match="should have"):
        read_payload(DATA + b"\0", "toy", 3)


def test_every_flipped_bit_is_refused():
    for i in range(8 * len(DATA)):
        bad = bytearray(DATA)
        bad[i // 8] ^= 1 << i % 8
        with pytest.raises(PayloadError):
            read_payload(bytes(bad), "toy", 3)


def test_the_message_names_the_place():
    at = DATA.index(STREAMS["codes"]) + 5
    bad = bytearray(DATA)
    bad[at] ^= 1
    with pytest.raises(PayloadError, match=f"'codes' .bytes {at - 5:,}"):
        read_payload(bytes(bad), "toy", 3)


def test_another_format_or_version_is_named():
    with pytest.raises(PayloadError, match="format 'toy', not 'kvtc'"):
        read_payload(DATA, "kvtc", 3)
    with pytest.raises(PayloadError, match="version 3"):
        read_payload(DATA, "toy", 4)
    with pytest.raises(PayloadError, match="no stored KV"):
        read_payload(b"PK\x03\x04" + DATA[4:], "toy", 3)


@pytest.mark.parametrize(
    ("good", "bad"), [(b'"streams"', b'"streamz"'), (b'"codes",200', b'"codes",1e9' + b"9" * 3)]
)
def test_a_header_with_a_right_checksum_and_wrong_content_is_refused(good: bytes, bad: bytes):
    """A number beyond all floats is one that json reads, as infinity."""
    size = int.from_bytes(DATA[14:18], "little")
    text = DATA[START : START + size].replace(good, bad)
    begin = bytearray(DATA[: START - 4])
    begin[14:18] = len(text).to_bytes(4, "little")
    begin[18:26] = (len(DATA) + len(text) - size).to_bytes(8, "little")
    crc = zlib.crc32(text, zlib.crc32(begin)).to_bytes(4, "little")
    with pytest.raises(PayloadError, match="cannot be read"):
        read_payload(bytes(begin) + crc + text + DATA[START + size :], "toy", 3)


def test_a_stream_of_another_length_is_refused():
    payload = read_payload(DATA, "toy", 3)
    assert payload.stream("scales", 2) == b"\x01\x02"
    with pytest.raises(PayloadError, match="3"):
        payload.stream("scales", 3)
    with pytest.raises(PayloadError, match="'none'"):
        payload.stream("none")
