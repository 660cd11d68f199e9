"""KVTC at rest: pages coded one by one are decoded together, whole conversations in slices."""

from __future__ import annotations

import pytest
import torch

from workbench.kv.cached import CachedRows
from workbench.kv.kvtc.rest import KvtcRows
from workbench.models.progress import Cancel
from workbench.spec.errors import Cancelled, PayloadError


def cut(rows: CachedRows, begin: int, end: int) -> CachedRows:
    part = slice(begin, end)
    return CachedRows(tuple(x[part] for x in rows.k), tuple(x[part] for x in rows.v), rows.positions[part])


def test_pages_one_behind_the_other_are_the_pages_themselves(make_codec, make_rows, joint):
    rows, codec = make_rows(joint, 96), KvtcRows(make_codec(6, window=0))
    pages = [codec.encode(cut(rows, at, at + 32)) for at in (0, 32, 64)]
    joined = codec.open(b"".join(pages))
    assert torch.equal(joined.positions, rows.positions)
    for layer in range(joint.num_layers):
        apart = [codec.open(page).layer(layer) for page in pages]
        for side in range(2):
            expected = torch.cat([pair[side] for pair in apart])
            assert torch.allclose(joined.layer(layer)[side], expected, rtol=1e-5, atol=1e-5)
    first = codec.open(pages[0]).layer(0)[0]
    assert torch.equal(first[:4], rows.k[0][:4].half().float())  # sinks begin the first page only
    assert not torch.equal(codec.open(pages[1]).layer(0)[0][:4], rows.k[0][32:36].half().float())


def test_slices_never_show(make_codec, make_rows, joint, monkeypatch):
    rows, codec = make_rows(joint, 150), KvtcRows(make_codec(6))
    whole = codec.encode(rows)
    monkeypatch.setattr("workbench.kv.kvtc.rest.SLICE", 40)
    assert codec.encode(rows) == whole


def test_a_cancel_ends_it_between_two_slices(make_codec, make_rows, joint):
    asked = []

    def cancel() -> bool:
        asked.append(None)
        return len(asked) > 1

    stop: Cancel = cancel
    with pytest.raises(Cancelled):
        KvtcRows(make_codec(6)).encode(make_rows(joint, 400), None, stop)


def test_one_damaged_page_refuses_all(make_codec, make_rows, joint):
    rows, codec = make_rows(joint, 64), KvtcRows(make_codec(6, window=0))
    good = codec.encode(cut(rows, 0, 32))
    with pytest.raises(PayloadError):
        codec.open(good + good[:-1])


def test_bytes_held_are_those_of_copies_made(make_codec):
    codec = KvtcRows(make_codec(7))
    before = codec.nbytes
    sides = codec.codec.artefact.k, codec.codec.artefact.v
    codec.ready(torch.bfloat16)
    assert codec.nbytes - before == sum(s.basis.components.nbytes for s in sides)
    codec.ready(torch.float32)
    assert codec.nbytes - before == 3 * sum(s.basis.components.nbytes for s in sides)
