"""The codec as a whole: exempt rows, chunks, layers, identity, damage."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from workbench.kv.cached import CachedRows
from workbench.kv.container import read_payload
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.header import KIND, VERSION
from workbench.spec.errors import OptionError, PayloadError, UnsupportedInput, WrongShape


def part(rows, begin, end):
    cut = slice(begin, end)
    return CachedRows(tuple(x[cut] for x in rows.k), tuple(x[cut] for x in rows.v), rows.positions[cut])


def error(a, b, which=slice(None)):
    pairs = [
        (x[which], y[which])
        for one in ("k", "v")
        for x, y in zip(getattr(a, one), getattr(b, one), strict=True)
    ]
    return sum(float((x - y).double().square().sum()) for x, y in pairs) / sum(
        float(x.double().square().sum()) for x, _ in pairs
    )


@pytest.mark.parametrize("entropy", ["none", "deflate", "range"])
def test_sinks_and_window_come_back_in_16_bits_and_the_rest_nearly(make_codec, joint, make_rows, entropy):
    rows, codec = make_rows(joint, 200), make_codec(entropy=entropy)
    out = codec.decode(codec.encode(rows))
    assert codec.coded(200) == 160 and torch.equal(out.positions, rows.positions)
    for a, b in zip((*rows.k, *rows.v), (*out.k, *out.v), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        for exempt in (slice(0, 4), slice(164, 200)):
            assert torch.equal(b[exempt], a[exempt].half().float())
    assert 0 < error(rows, out, slice(4, 164)) < 0.01


def test_the_error_falls_with_the_budget(make_codec, joint, make_rows):
    rows = make_rows(joint, 200)
    errors = [error(rows, c.decode(c.encode(rows))) for c in (make_codec(r) for r in (32, 12, 6, 3))]
    assert errors == sorted(errors, reverse=True) and errors[0] > 10 * errors[-1]


def test_every_entropy_stage_restores_the_same(make_codec, joint, make_rows):
    rows = make_rows(joint, 200)
    a, b, c = (
        make_codec(entropy=e).decode(make_codec(entropy=e).encode(rows)) for e in ("none", "deflate", "range")
    )
    for x, y, z in zip((*a.k, *a.v), (*b.k, *b.v), (*c.k, *c.v), strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


@pytest.mark.parametrize("sizes", [[1] * 150, [16] * 9 + [6], [3, 100, 2, 45], [149, 1]])
def test_pushing_a_sequence_in_pieces_gives_the_bytes_of_the_whole(make_codec, joint, make_rows, sizes):
    rows, codec = make_rows(joint, 150), make_codec()
    encoder, at = codec.encoder(), 0
    for n in sizes:
        encoder.push(part(rows, at, at + n))
        at += n
    assert encoder.payload() == codec.encode(rows)


def test_a_payload_can_be_asked_for_while_the_sequence_grows(make_codec, joint, make_rows):
    rows, codec = make_rows(joint, 150), make_codec()
    encoder = codec.encoder()
    encoder.push(part(rows, 0, 70))
    assert encoder.payload() == codec.encode(part(rows, 0, 70))
    encoder.push(part(rows, 70, 150))
    assert encoder.payload() == codec.encode(rows)


@pytest.mark.parametrize("tokens", [1, 3, 4, 36, 51, 52])
def test_short_sequences_are_kept_in_16_bits(make_codec, joint, make_rows, tokens):
    rows, codec = make_rows(joint, tokens), make_codec()
    out = codec.decode(codec.encode(rows))
    assert codec.coded(tokens) == (16 if tokens == 52 else 0)
    assert torch.equal(out.k[1][:4], rows.k[1][:4].half().float())
    assert out.tokens == tokens


def test_a_later_part_of_a_sequence_has_no_sinks(make_codec, joint, make_rows):
    rows, codec = make_rows(joint, 100, first=60), make_codec()
    stored = codec.open(codec.encode(rows))
    assert stored.header.lead == 0 and stored.header.coded == 64
    assert error(rows, stored.rows()) < 0.01


def test_one_layer_at_a_time_equals_the_whole_inverse(make_codec, joint, make_rows):
    rows, codec = make_rows(joint, 200), make_codec()
    stored = codec.open(codec.encode(rows))
    sides = zip((codec.artefact.k, codec.artefact.v), stored.coefficients, strict=True)
    k, v = (c @ s.basis.components.float() + s.basis.mean for s, c in sides)
    for layer in range(3):
        got_k, got_v = stored.layer(layer)
        want = k[:, joint.columns(layer)].reshape(-1, joint.heads, joint.dim)
        torch.testing.assert_close(
            got_k[4:164], joint.rotate(want, torch.arange(4, 164)), atol=1e-4, rtol=1e-5
        )
        want = v[:, joint.columns(layer)].reshape(-1, joint.heads, joint.dim)
        torch.testing.assert_close(got_v[4:164], want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_kvc_13_layer_count_comes_from_the_model(make_joint, make_calibration, make_rows, layers):
    joint = make_joint(layers)
    codec = Kvtc(make_calibration(joint).artefact(4, 4), joint, "model", window=16)
    rows = make_rows(joint, 100)
    out = codec.decode(codec.encode(rows))
    assert len(out.k) == len(out.v) == layers
    for i in range(layers):
        others = [float((rows.v[j] - out.v[i]).square().mean()) for j in range(layers)]
        assert others.index(min(others)) == i and out.k[i].shape == rows.k[i].shape


def test_sliding_layers_keep_their_window_and_nothing_else(make_joint, make_calibration, make_rows):
    joint = make_joint(4, sliding=True)
    assert joint.layers == (1, 3) and joint.features == 2 * joint.width
    codec = Kvtc(make_calibration(joint).artefact(4, 4), joint, "model", window=16)
    rows = make_rows(joint, 100)
    out = codec.decode(codec.encode(rows))
    for layer in (0, 2):
        assert torch.equal(out.k[layer][-24:], rows.k[layer][-24:].half().float())
        assert not out.k[layer][:-24].any()
    assert codec.analytic_bytes(100) == 80 * codec.artefact.bits // 8 + 4 * joint.width * (2 * 20 + 2 * 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_come_back_in_the_dtype_of_the_cache(make_codec, joint, make_rows, dtype):
    rows = make_rows(joint, 100)
    cast = CachedRows(*(tuple(x.to(dtype) for x in side) for side in (rows.k, rows.v)), rows.positions)
    out = make_codec().decode(make_codec().encode(cast))
    assert out.k[0].dtype == dtype and error(cast, out) < 0.02
    if dtype == torch.bfloat16:
        assert torch.equal(out.k[2][-32:], cast.k[2][-32:])


def test_sinks_must_be_exempt(make_codec, joint, make_rows):
    rows = make_rows(joint, 200)
    good = error(rows, make_codec().round_trip(rows).rows, slice(0, 4))
    bad = error(rows, make_codec(sinks=0).round_trip(rows).rows, slice(0, 4))
    assert bad > 100 * good


# -- bytes -----------------------------------------------------------------------------------------


def test_packed_bytes_are_the_analytic_count(make_codec, joint, make_rows):
    rows, codec = make_rows(joint, 500), make_codec(entropy="none")
    found = codec.round_trip(rows)
    streams = read_payload(codec.encode(rows), KIND, VERSION).streams
    assert sum(map(len, streams.values())) == codec.analytic_bytes(500)
    assert codec.analytic_bytes(500) <= found.payload < codec.analytic_bytes(500) + 1000
    assert found.exempt == 500 - codec.coded(500)


def test_artefact_bytes_and_break_even(make_codec, calibration):
    artefact = make_codec(12).artefact
    rank = artefact.k.plan.rank + artefact.v.plan.rank
    assert artefact.nbytes == 2 * 96 * rank + 2 * 4 * 96 + 8 * (
        len(artefact.k.plan.groups) + len(artefact.v.plan.groups)
    )
    assert artefact.break_even(84.0) == pytest.approx(artefact.nbytes / 300)
    assert artefact.break_even(384.0) == float("inf")
    assert artefact.bits <= 2 * 16 * 96 / 12


# -- a new process ---------------------------------------------------------------------------------


def test_a_new_process_decodes_the_encoders_own_reconstruction(make_codec, joint, make_rows, tmp_path):
    codec, rows = make_codec(entropy="range"), make_rows(joint, 150)
    payload = codec.encode(rows)
    (tmp_path / "payload").write_bytes(payload)
    here = Path(__file__).parent / "conftest.py"
    script = f"""
import importlib.util, pathlib, sys, zlib
spec = importlib.util.spec_from_file_location("made", {str(here)!r})
made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made)
joint = made.JointRows(made.config())
codec = made.Kvtc(made.calibrate(joint).artefact(6, 6), joint, "model", sinks=4, window=32)
rows = codec.decode(pathlib.Path({str(tmp_path / "payload")!r}).read_bytes())
print(zlib.crc32(b"".join(x.numpy().tobytes() for x in (*rows.k, *rows.v))))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    mine = codec.round_trip(rows).rows
    assert int(out.stdout) == zlib.crc32(b"".join(x.numpy().tobytes() for x in (*mine.k, *mine.v)))


# -- refusals --------------------------------------------------------------------------------------


def test_damage_is_refused(make_codec, joint, make_rows):
    codec = make_codec()
    data = codec.encode(make_rows(joint, 120))
    gen = torch.Generator().manual_seed(1)
    for bit in torch.randint(0, 8 * len(data), (300,), generator=gen).tolist():
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            codec.open(bytes(bad))
    for n in (0, 10, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(PayloadError):
            codec.open(data[:n])


def test_another_model_calibration_or_rotation_is_named(
    make_codec, joint, make_joint, make_rows, calibration, make_calibration
):
    data = make_codec().encode(make_rows(joint, 120))
    with pytest.raises(PayloadError, match="calibration or bit plan"):
        make_codec(12).open(data)
    foreign = Kvtc(make_calibration(joint, "another").artefact(6, 6), joint, "another")
    with pytest.raises(PayloadError, match="weights: model, not another"):
        foreign.open(data)
    with pytest.raises(PayloadError, match="other weights"):
        Kvtc(calibration.artefact(6, 6), joint, "another")
    with pytest.raises(PayloadError, match="rotary embedding"):
        Kvtc(calibration.artefact(6, 6), make_joint(5), "model")


def test_bad_rows_and_options_are_refused_and_leave_the_encoder_as_it_was(make_codec, joint, make_rows):
    rows, codec = make_rows(joint, 100), make_codec()
    encoder = codec.encoder()
    with pytest.raises(UnsupportedInput, match="no rows"):
        encoder.payload()
    encoder.push(part(rows, 0, 60))
    with pytest.raises(UnsupportedInput, match="60 should come next"):
        encoder.push(part(rows, 61, 70))
    with pytest.raises(WrongShape, match="2 layers"):
        encoder.push(CachedRows(rows.k[:2], rows.v[:2], rows.positions))
    bad = part(rows, 60, 100)
    bad.k[1][3, 0, 0] = torch.nan
    with pytest.raises(UnsupportedInput, match="NaN"):
        encoder.push(bad)
    bad.k[1][3, 0, 0] = 0.5
    encoder.push(bad)
    assert codec.open(encoder.payload()).header.tokens == 100
    huge = part(rows, 0, 100)
    huge.k[0][0, 0, 0] = 1e6
    with pytest.raises(UnsupportedInput, match="float16"):
        codec.encode(huge)
    with pytest.raises(OptionError, match="entropy"):
        make_codec(entropy="zip")
    with pytest.raises(OptionError, match="ratio"):
        make_codec(1)
