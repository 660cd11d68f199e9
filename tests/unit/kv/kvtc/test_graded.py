"""KVTC by age: spans of ages with their own ratios, put together without a gap, honestly counted."""

from __future__ import annotations

import pytest
import torch

from workbench.kv.kvtc.graded import Grade, Graded, grades
from workbench.spec.errors import OptionError


@pytest.fixture(scope="module")
def make(calibration, joint):
    def made(near="32x3/64x6", far=(16, 24), **options):
        return Graded(calibration, joint, "model", grades(near), far, **options)

    return made


def test_grades_from_text():
    assert grades("64x8/448x24:32") == (Grade(64, 8, 8), Grade(448, 24, 32)) and grades("") == ()


@pytest.mark.parametrize(
    "text", ["64", "x8", "64x", "60x8", "0x8", "-16x8", "64x8/a", "64x8:", "16.5x8", "64xnone"]
)
def test_grades_that_are_none(text):
    with pytest.raises(OptionError):
        grades(text)


@pytest.mark.parametrize("tokens", [1, 4, 5, 20, 33, 64, 100, 101, 117, 200])
def test_every_row_comes_back_in_its_place(make, joint, make_rows, tokens):
    rows, codec = make_rows(joint, tokens), make()
    spans = codec.spans(rows)
    assert [b for _, b, _ in spans] == [0, *(e for _, _, e in spans)][:-1] and spans[-1][2] == tokens
    out = codec.decode(rows, codec.encode(rows))
    assert torch.equal(out.positions, rows.positions)
    for a, b in zip((*rows.k, *rows.v), (*out.k, *out.v), strict=True):
        assert a.shape == b.shape and torch.equal(b[:4], a[:4].half().float())
    exact = sum(
        all(torch.equal(b[i], a[i].half().float()) for a, b in zip(rows.k, out.k, strict=True))
        for i in range(tokens)
    )
    assert exact == codec.exempt(rows)


def test_younger_tokens_are_kept_better_and_the_last_ones_in_16_bits(make, joint, make_rows):
    rows = make_rows(joint, 4 + 96 + 64 + 32 + 8)
    codec = make(window=8)
    assert [(b, e) for _, b, e in codec.spans(rows)] == [(0, 100), (100, 164), (164, 204)]
    out = codec.decode(rows, codec.encode(rows))

    def error(begin, end):
        pairs = zip((*rows.k, *rows.v), (*out.k, *out.v), strict=True)
        return sum(float((a[begin:end] - b[begin:end]).square().mean()) for a, b in pairs)

    assert error(4, 100) > error(100, 164) > error(164, 196) > error(196, 204)
    assert codec.exempt(rows) == 12 and torch.equal(out.k[0][196:], rows.k[0][196:].half().float())


def test_one_grade_alone_is_plain_kvtc(make, make_codec, joint, make_rows):
    rows = make_rows(joint, 180)
    graded, plain = make("", (6, 6), window=32), make_codec(6)
    assert graded.encode(rows) == [plain.encode(rows)]
    assert graded.shared_bytes == plain.shared_bytes


def test_the_key_names_every_grade(make):
    made = [
        make(),
        make("32x3/64x8"),
        make("32x3/80x6"),
        make(far=(16, 16)),
        make(window=16),
        make(entropy="range"),
    ]
    assert len({c.key for c in made}) == len(made)
