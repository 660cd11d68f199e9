"""Ratios and break-even are those of bytes that exist."""

from __future__ import annotations

import pytest

from workbench.kv.container import read_payload
from workbench.kv.kvtc.account import account
from workbench.kv.kvtc.config import CLAIMS, Config
from workbench.kv.kvtc.header import KIND, VERSION
from workbench.spec.errors import PayloadError
from workbench.spec.technique import options_of

TOKEN = 2 * 2 * 3 * 2 * 16  # bytes of a token in 16 bits: K and V, 3 layers, 2 heads of 16


@pytest.mark.parametrize("entropy", ["none", "deflate", "range"])
def test_ratios_are_of_all_bytes(make_codec, joint, make_rows, entropy):
    codec = make_codec(entropy=entropy)
    data = codec.encode(make_rows(joint, 400))
    found, streams = account(codec, data), read_payload(data, KIND, VERSION).streams
    assert (found.tokens, found.coded, found.payload) == (400, 352, len(data))
    assert found.exempt == len(streams["lead"]) + len(streams["tail"]) == 48 * TOKEN
    assert found.whole_ratio == pytest.approx(400 * TOKEN / len(data))
    assert found.codec_ratio == pytest.approx(352 * TOKEN / (len(data) - 48 * TOKEN))
    assert found.whole_ratio < 400 / 48 and found.codec_ratio > found.whole_ratio
    cross = codec.artefact.cross.nbytes if entropy == "range" else 0
    assert found.shared == codec.artefact.nbytes + cross
    per_token = (len(data) - 48 * TOKEN) / 352
    assert found.break_even == pytest.approx(found.shared / (TOKEN - per_token))


def test_better_stages_give_better_ratios(make_codec, joint, make_rows):
    rows = make_rows(joint, 480)
    ratios = [
        account(c, c.encode(rows)).codec_ratio
        for c in (make_codec(entropy=e) for e in ("none", "deflate", "range"))
    ]
    assert ratios == sorted(ratios)


def test_nothing_coded_has_no_codec_ratio(make_codec, joint, make_rows):
    codec = make_codec()
    found = account(codec, codec.encode(make_rows(joint, 30)))
    assert found.codec_ratio is None and found.break_even is None and found.whole_ratio < 1


def test_a_foreign_payload_has_no_account(make_codec, joint, make_rows):
    with pytest.raises(PayloadError):
        account(make_codec(), make_codec(12).encode(make_rows(joint, 100)))


def test_the_defaults_are_the_papers_and_every_option_is_explained():
    config = Config()
    assert (config.k_ratio, config.sinks, config.window, config.entropy) == (16.0, 4, 128, "deflate")
    assert all(o.help for o in options_of(Config)) and all(c.source.startswith("https://") for c in CLAIMS)
