"""Byte strings behind their lengths: what goes in comes out, and lengths that lie are refused."""

from __future__ import annotations

import pytest

from workbench.kv.frames import frame, frames
from workbench.spec.errors import PayloadError


def test_what_goes_in_comes_out_and_can_be_put_together():
    parts = [b"", b"abc", bytes(300)]
    joined = b"".join(map(frame, parts))
    assert [bytes(p) for p in frames(joined)] == parts
    assert [bytes(p) for p in frames(joined + joined)] == parts * 2


@pytest.mark.parametrize(
    "bad", [b"", b"\x01", frame(b"abc")[:-1], frame(b"abc") + b"\x00\x00", b"\xff\xff\xff\xff" + bytes(8)]
)
def test_lengths_that_lie_are_refused(bad):
    with pytest.raises(PayloadError, match="stored rows"):
        frames(bad)
