"""Chunks: equal to the encoder's own reconstruction, self-contained, layer-wise, refused when foreign."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from workbench.kv.cached import CachedRows
from workbench.kv.cachegen import ranges
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.context import cut, encode_context, join, round_trip, spans
from workbench.kv.cachegen.header import KIND, VERSION, Header
from workbench.kv.cachegen.levels import DELTA_LEVELS, LEVELS, Level
from workbench.kv.cachegen.quantize import encode_rows
from workbench.kv.container import read_payload, write_payload
from workbench.spec.errors import Cancelled, OptionError, PayloadError, UnsupportedInput, WrongShape

L32 = LEVELS[1]


def same(a: CachedRows, b: CachedRows) -> bool:
    pairs = zip((*a.k, *a.v), (*b.k, *b.v), strict=True)
    return torch.equal(a.positions, b.positions) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )


def error(a: CachedRows, b: CachedRows) -> float:
    pairs = list(zip((*a.k, *a.v), (*b.k, *b.v), strict=True))
    return float(sum((x - y).pow(2).sum() for x, y in pairs) / sum(x.pow(2).sum() for x, _ in pairs))


@pytest.mark.parametrize("tokens", [1, 10, 37, 123])
def test_decoding_gives_the_encoders_own_reconstruction_bit_for_bit(codec, make_rows, level, tokens):
    rows = make_rows(tokens, first=5)
    data = codec.encode(rows, level)
    back = codec.decode(data)
    assert same(back, codec.reconstruct(rows, level))
    assert codec.encode(rows, level) == data
    assert error(rows, back) < 0.2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_caches_dtype_comes_back(codec, make_rows, dtype):
    rows = make_rows(21, dtype=dtype)
    back = codec.decode(codec.encode(rows, L32))
    assert back.k[0].dtype == back.v[-1].dtype == dtype and same(back, codec.reconstruct(rows, L32))


def test_coarser_levels_are_smaller_and_worse(codec, make_rows):
    rows = make_rows(200)
    for ladder in (LEVELS, DELTA_LEVELS):
        data = [codec.encode(rows, n) for n in ladder]
        sizes, errors = [len(d) for d in data], [error(rows, codec.decode(d)) for d in data]
        assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)


def test_bytes_are_within_one_percent_of_the_analytic_count(codec, make_rows, level):
    rows = make_rows(507)
    payload = read_payload(codec.encode(rows, level), KIND, VERSION)
    ideal = 0.0
    for layer in range(3):
        for side in ("k", "v"):
            alphabet = level.alphabet(side, layer, 3)
            parts = encode_rows(getattr(rows, side)[layer].flatten(1), alphabet).parts(alphabet)
            ideal += 2 * rows.tokens
            ideal += ranges.ideal_bits([(c, codec.artefact.table(a, side, layer)) for a, c in parts]) / 8
    assert ideal <= sum(map(len, payload.streams.values())) <= 1.01 * ideal


def test_layers_are_decoded_one_at_a_time_and_alone(codec, make_rows, monkeypatch):
    rows = make_rows(40)
    stored = codec.open(codec.encode(rows, L32))
    whole = stored.rows()
    calls = []
    decode = ranges.decode
    monkeypatch.setattr(ranges, "decode", lambda *args: calls.append(1) or decode(*args))
    k, v = stored.layer(1)
    assert torch.equal(k, whole.k[1]) and torch.equal(v, whole.v[1]) and len(calls) == 2


def test_a_new_process_decodes_from_bytes_and_tables_alone(codec, make_rows, tmp_path):
    rows, level = make_rows(33, first=7), DELTA_LEVELS[0]
    (tmp_path / "chunk").write_bytes(codec.encode(rows, level))
    artefact = codec.artefact
    save_file({a.name: t for a, t in artefact.tables.items()}, tmp_path / "tables")
    want = codec.reconstruct(rows, level)
    np.save(tmp_path / "want.npy", torch.stack([*want.k, *want.v]).numpy())
    code = f"""
import numpy as np, sys
from pathlib import Path
from safetensors.numpy import load_file
from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.levels import Alphabet
folder = Path(sys.argv[1])
class Layout:  # geometry alone: no model is needed to decode
    layers, heads, dim, channels, key, limit = 3, 2, 16, 32, {codec.layout.key!r}, 512
    kept = staticmethod(lambda layer, begin, end, context: end - begin)
tables = {{Alphabet(n[: -len(n.lstrip("rowsdelta"))], int(n.lstrip("rowsdelta"))): t
          for n, t in load_file(folder / "tables").items()}}
codec = CacheGen(Artefact(tables, "model", Layout.key, "", 0), Layout(), "model")
rows = codec.decode((folder / "chunk").read_bytes())
found = np.stack([x.numpy() for x in (*rows.k, *rows.v)])
sys.exit(not (np.array_equal(found, np.load(folder / "want.npy")) and int(rows.positions[0]) == 7))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_damaged_chunks_are_refused(codec, make_rows):
    data = codec.encode(make_rows(12), L32)
    for n in range(0, len(data), 7):
        with pytest.raises(PayloadError):
            codec.decode(data[:n])
    for bit in range(0, 8 * len(data), 101):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            codec.decode(bytes(bad))
    with pytest.raises(PayloadError, match="kvtc"):
        codec.open(write_payload("kvtc", 1, {}, {}))


def test_a_chunk_of_other_weights_rope_or_tables_is_refused_by_name(codec, make_layout, make_rows, artefact):
    rows = make_rows(12)
    data = codec.encode(rows, L32)
    with pytest.raises(PayloadError, match="weights"):
        CacheGen(dataclasses.replace(artefact, model="other"), codec.layout, "other").open(data)
    other = make_layout(theta=20_000.0)
    with pytest.raises(PayloadError, match="rotary"):
        CacheGen(dataclasses.replace(artefact, layout=other.key), other, "model").open(data)
    with pytest.raises(PayloadError, match="probability tables"):
        CacheGen(artefact.pooled(), codec.layout, "model").open(data)
    few = {a: t for a, t in artefact.tables.items() if a.bins != 32}
    with pytest.raises(PayloadError, match="rows32"):
        CacheGen(dataclasses.replace(artefact, tables=few), codec.layout, "model").open(data)
    with pytest.raises(PayloadError, match="tables are of other weights"):
        CacheGen(artefact, codec.layout, "other")
    with pytest.raises(PayloadError, match="rotary"):
        CacheGen(artefact, other, "model")


def test_a_smaller_context_limit_reads_what_fits(codec, make_layout, make_rows, artefact):
    data = codec.encode(make_rows(12, first=60), L32)
    smaller = make_layout(limit=80)
    assert same(CacheGen(artefact, smaller, "model").decode(data), codec.decode(data))
    with pytest.raises(PayloadError, match="context is 70"):
        CacheGen(artefact, make_layout(limit=70), "model").open(data)


def forged(data: bytes, **changes: object) -> bytes:
    payload = read_payload(data, KIND, VERSION)
    streams = {n: bytes(changes.pop(n, s)) for n, s in payload.streams.items()}  # type: ignore[call-overload]
    return write_payload(KIND, VERSION, payload.header | changes, streams)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 0},
        {"tokens": 10**6},
        {"tokens": 13},
        {"first": -3},
        {"context": 3},
        {"context": 10**9},
        {"dtype": "int8"},
        {"dtype": 5},
        {"level": {"name": "x", "k": [32, 31, 32], "v": [32] * 3, "delta": False}},
        {"level": {"name": "x", "k": [32] * 3, "v": [32] * 3, "delta": 1}},
        {"level": 7},
        {"model": None},
        {"k.1": b""},
        {"k.1": b"\0" * 30},
        {"v.0": b"\xff" * 400},
    ],
    ids=str,
)
def test_forged_payloads_with_right_checksums_are_refused(codec, make_rows, change):
    data = codec.encode(make_rows(12), L32)
    with pytest.raises(PayloadError):
        codec.decode(forged(data, **change))


def test_what_cannot_be_coded_is_refused(codec, make_rows):
    rows = make_rows(12)
    gap = dataclasses.replace(rows, positions=torch.tensor([*range(11), 12]))
    far = dataclasses.replace(rows, positions=torch.arange(505, 517))
    whole = CachedRows(tuple(x.int() for x in rows.k), tuple(x.int() for x in rows.v), rows.positions)
    for bad, match in ((gap, "consecutive"), (far, "512"), (whole, "int32"), (make_rows(0), "no rows")):
        with pytest.raises(UnsupportedInput, match=match):
            codec.encode(bad, L32)
    rows.k[1][4, 0, 0] = float("nan")
    with pytest.raises(UnsupportedInput, match="NaN"):
        codec.encode(rows, L32)
    with pytest.raises(WrongShape, match="2 layers"):
        codec.encode(dataclasses.replace(rows, v=rows.v[:2]), L32)
    with pytest.raises(WrongShape, match="Layer 0"):
        codec.encode(dataclasses.replace(rows, k=tuple(x[:, :1] for x in rows.k)), L32)
    with pytest.raises(OptionError, match="rows100"):
        codec.encode(make_rows(12), Level("x", (100,) * 3, (32,) * 3))


@pytest.mark.parametrize("layers", [1, 3, 5])
def test_kvc_13_any_number_of_layers(make_layout, make_artefact, make_rows, layers):
    layout = make_layout(layers)
    codec = CacheGen(make_artefact(layout), layout, "model")
    rows = make_rows(25, layers=layers)
    for level in (LEVELS[2], DELTA_LEVELS[1]):
        back = codec.decode(codec.encode(rows, level))
        assert len(back.k) == layers and same(back, codec.reconstruct(rows, level))


def test_of_sliding_layers_only_what_the_window_reaches_is_sent(make_layout, make_artefact, make_rows):
    layout = make_layout(4, sliding=True)
    codec = CacheGen(make_artefact(layout), layout, "model")
    rows = make_rows(100, layers=4)
    chunks = encode_context(codec, rows, [L32], chunk=40, trim=True)
    alone = encode_context(codec, rows, [L32], chunk=40)
    assert len(alone[0][0]) > len(chunks[0][0]) and alone[2] == chunks[2]
    assert alone[0] == encode_context(codec, cut(rows, 0, 40), [L32], chunk=40)[0]
    sizes = [{n: len(s) for n, s in read_payload(c[0], KIND, VERSION).streams.items()} for c in chunks]
    assert sizes[0]["k.0"] == sizes[0]["v.2"] == 0 and sizes[0]["k.1"] > 0
    back = join([codec.decode(c[0]) for c in chunks])
    for layer, window in enumerate(layout.windows):
        kept = 100 if window is None else 24
        assert not back.k[layer][: 100 - kept].any() and back.k[layer][100 - kept :].flatten(1).any(1).all()
    pieces = [codec.reconstruct(cut(rows, b, e), L32, context=100) for b, e in spans(100, 40)]
    assert same(back, join(pieces))


def test_chunks_are_independent_and_may_end_short(codec, make_rows):
    rows = make_rows(107)
    chunks = encode_context(codec, rows, [LEVELS[0], DELTA_LEVELS[0]], chunk=40)
    assert [len(c) for c in chunks] == [2, 2, 2] and spans(107, 40)[-1] == (80, 107)
    last = codec.decode(chunks[2][1])
    assert same(last, codec.reconstruct(cut(rows, 80, 107), DELTA_LEVELS[0]))
    assert codec.open(chunks[1][0]).header.level == LEVELS[0]
    mixed = join([codec.decode(chunks[i][i % 2]) for i in range(3)])
    assert torch.equal(mixed.positions, rows.positions) and mixed.k[0].shape == rows.k[0].shape
    with pytest.raises(OptionError, match="chunks"):
        spans(10, 0)


def test_the_round_trip_counts_every_byte(codec, make_rows):
    rows = make_rows(107)
    found = round_trip(codec, L32, chunk=40)(rows)
    assert found.payload == sum(len(c[0]) for c in encode_context(codec, rows, [L32], chunk=40))
    assert found.exempt == 0 and error(rows, found.rows) < 0.02
    assert round_trip(codec, L32)(make_rows(0)).payload == 0


def test_coding_tells_its_progress_and_can_be_cancelled(codec, make_rows):
    told: list[float] = []
    encode_context(codec, make_rows(60), LEVELS[:2], chunk=20, progress=lambda f, _: told.append(f))
    assert told == sorted(told) and told[-1] == pytest.approx(1) and len(told) == 3 * 2 * 3
    seen = []
    with pytest.raises(Cancelled):
        encode_context(
            codec,
            make_rows(60),
            LEVELS[:2],
            chunk=20,
            progress=lambda f, _: seen.append(f),
            cancel=lambda: len(seen) >= 4,
        )
    assert len(seen) == 4


def test_tables_are_counted_and_named(codec, artefact):
    assert artefact.nbytes(L32) == 2 * 2 * 3 * 32 * 31
    assert artefact.nbytes(DELTA_LEVELS[0]) == 2 * 2 * 32 * (31 + 15 + 15 + 3 * 255)
    assert artefact.tokens == 1000 and artefact.layers == 3 and artefact.channels == 32
    even = artefact.break_even(L32, 100.0)
    assert even * (4 * 3 * 32 - 100) == pytest.approx(artefact.nbytes(L32))
    assert artefact.break_even(L32, 1e9) == float("inf")
    keys = {codec.key(n) for n in LEVELS + DELTA_LEVELS}
    assert len(keys) == len(LEVELS + DELTA_LEVELS)


def test_the_header_is_plain_data(codec, make_rows):
    header = codec.open(codec.encode(make_rows(12, first=3), LEVELS[2], context=99)).header
    assert Header.read(header.to_json()) == header
    assert (header.first, header.tokens, header.context, header.dtype) == (3, 12, 99, "float32")
