"""KVTC whatever the lengths, windows and cuts: same bytes, exempt rows in 16 bits, budget kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kv.cached import CachedRows
from workbench.kv.kvtc import ranges
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.basis import Moments
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.codes import Coder
from workbench.kv.kvtc.cross import CrossMoments
from workbench.kv.kvtc.deflate import packed, unpacked
from workbench.kv.kvtc.distortion import measure
from workbench.kv.kvtc.formats import KINDS, SIZES
from workbench.kv.kvtc.joint import JointRows
from workbench.kv.kvtc.plan import BitPlan, Group, best_plan
from workbench.models.config import ModelConfig

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
)
JOINT = JointRows(CONFIG)


def random_rows(tokens: int, seed: int = 0) -> CachedRows:
    gen = torch.Generator().manual_seed(seed)
    k, v = (tuple(torch.randn(tokens, 2, 8, generator=gen) for _ in range(3)) for _ in range(2))
    return CachedRows(k, v, torch.arange(tokens))


def calibration() -> Calibration:
    rows = random_rows(250, 1)
    flats = JOINT.keys(rows.k, rows.positions), JOINT.values(rows.v)
    bases = []
    for flat in flats:
        moments = Moments(JOINT.features)
        moments.add(flat)
        bases.append(moments.basis(JOINT.features))
    cross = CrossMoments(*bases)
    cross.add(*flats)
    k, v = ((b, measure(b.project(f))) for b, f in zip(bases, flats, strict=True))
    return Calibration(k, v, cross.cross(), "model", JOINT.key, "noise", 250)


ARTEFACT = calibration().artefact(3, 4)


@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    sinks=st.integers(0, 9),
    window=st.integers(0, 40),
    entropy=st.sampled_from(["none", "deflate", "range"]),
)
def test_pieces_windows_and_sinks(pieces, sinks, window, entropy):
    tokens = sum(pieces)
    rows = random_rows(tokens)
    codec = Kvtc(ARTEFACT, JOINT, "model", sinks=sinks, window=window, entropy=entropy)
    encoder, at = codec.encoder(), 0
    for n in pieces:
        part = slice(at, at + n)
        encoder.push(
            CachedRows(tuple(x[part] for x in rows.k), tuple(x[part] for x in rows.v), rows.positions[part])
        )
        at += n
    data = encoder.payload()
    assert data == codec.encode(rows)
    stored = codec.open(data)
    coded = stored.header.coded
    assert coded == codec.coded(tokens) and tokens - coded < sinks + window + 16
    out = stored.rows()
    lead = min(sinks, tokens)
    for a, b in zip((*rows.k, *rows.v), (*out.k, *out.v), strict=True):
        assert torch.equal(b[:lead], a[:lead].half().float())
        assert torch.equal(b[lead + coded :], a[lead + coded :].half().float())


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(SIZES[:3]), st.sampled_from(KINDS), st.integers(0, 5)), max_size=5
    ),
    tokens=st.integers(1, 40),
    scale=st.floats(-5, 4),
)
def test_any_plan_packs_and_range_codes_exactly(kinds, tokens, scale):
    groups, at = [], 0
    for size, kind, gap in kinds:
        groups.append(Group(at + gap, size, kind))
        at += gap + size
    coder = Coder(BitPlan(tuple(groups), 0.0, 0))
    codes = coder.encode(torch.randn(tokens, coder.plan.rank) * 10**scale)
    for back in (
        unpacked(coder, tokens, packed(codes)),
        ranges.decode(ranges.encode(codes, coder), coder, tokens),
    ):
        assert torch.equal(coder.decode(back), coder.decode(codes))
        assert all(torch.equal(back.symbols[kind], codes.symbols[kind]) for kind in KINDS)


@settings(max_examples=25, deadline=None)
@given(budget=st.integers(0, 1500), seed=st.integers(0, 5))
def test_no_plan_passes_its_budget_and_more_bits_never_hurt(budget, seed):
    gen = torch.Generator().manual_seed(seed)
    d = measure(torch.randn(16, 90, generator=gen) * torch.logspace(1, -1, 90))
    plan, more = best_plan(d, budget), best_plan(d, budget + 64)
    assert plan.bits <= budget and more.error <= plan.error <= float(d.energy.sum()) * (1 + 1e-9)
