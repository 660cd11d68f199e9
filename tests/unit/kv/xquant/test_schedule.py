"""Schedules: widths, pairs, the paper's thresholds, and the cheapest sharing that reaches a target."""

from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from workbench.kv import xquant
from workbench.kv.xquant.harm import SharingHarm
from workbench.kv.xquant.schedule import Schedule, Side, cheapest, from_layer, pairs_of, sides, widths
from workbench.spec.technique import make_config


def test_pairs_stay_within_a_group_and_leave_the_odd_one_out() -> None:
    assert pairs_of([range(5)]) == ((0, 1), (2, 3))
    assert pairs_of([(0, 1, 3, 4), (2, 5)]) == ((0, 1), (2, 5), (3, 4))
    assert pairs_of([(0,), (1,)]) == ()


def test_widths_and_thresholds() -> None:
    assert widths(4, -1) == (2, 2, 2, 2)
    assert widths(4, 0) == (1, 1, 1, 1)
    assert widths(4, 3) == (2, 2, 2, 1)
    pairs = ((0, 1), (2, 3), (4, 5))
    assert from_layer(pairs, 3) == ((2, 3), (4, 5))
    assert from_layer(pairs, 4) == ((4, 5),)
    assert from_layer(pairs, -1) == () and from_layer(pairs, 0) == pairs


def test_a_sharer_takes_its_partners_width() -> None:
    assert sides([2, 1, 1, 1], [(0, 1)]) == (Side(2), Side(2, 0), Side(1), Side(1))


def test_code_bits_leave_metadata_out_and_count_sharers_as_zero() -> None:
    table = Schedule(sides([2, 2, 1, 1], [(0, 1)]), sides([2, 2, 1, 1], [(2, 3)]))
    assert table.code_bits == Fraction((2 + 0 + 1 + 1) + (2 + 2 + 1 + 0), 8)


def test_the_table_is_data_and_its_digest_the_key() -> None:
    a, b = (Schedule(sides([2, 2], [(0, 1)]), sides([2, 2], s)) for s in ((), [(0, 1)]))
    assert json.loads(json.dumps(asdict(a)))["keys"][1] == {"bits": 2, "owner": 0}
    assert a.key != b.key and a.key == Schedule(a.keys, a.values).key
    assert a.table()[1] == {"layer": 1, "k_bits": 2, "k_codes_of": 0, "v_bits": 2, "v_codes_of": None}


PAIRS = ((0, 1), (2, 3), (4, 5))
TWO = ((2,) * 6, (2,) * 6)
ALL = ([True] * 3, [True] * 3)


def test_the_cheapest_are_shared_first_until_the_target() -> None:
    harm = ([0.3, 0.1, 0.2], [0.05, 0.4, 0.15])
    none = cheapest(TWO, harm, PAIRS, ALL, 2.0)
    assert none.code_bits == 2
    three = cheapest(TWO, harm, PAIRS, ALL, 1.5)
    assert three.code_bits == Fraction(3, 2)
    assert [s.owner for s in three.keys] == [None, None, None, 2, None, None]
    assert [s.owner for s in three.values] == [None, 0, None, None, None, 4]
    assert cheapest(TWO, harm, PAIRS, ALL, 0.5).code_bits == 1  # everything that can be shared


def test_harm_is_judged_per_bit_saved() -> None:
    bits = ((2, 2, 1, 1, 2, 2), (2,) * 6)
    harm = ([0.2, 0.15, 9.0], [9.0, 9.0, 9.0])
    first = cheapest(bits, harm, PAIRS, ALL, float(Fraction(22, 12)) - 1e-9)
    assert first.keys[1].owner == 0  # 0.2 for two bits before 0.15 for one
    assert first.keys[3].owner is None


def test_what_is_vetoed_is_never_shared() -> None:
    harm = ([0.3, 0.1, 0.2], [0.05, 0.4, 0.15])
    vetoed = cheapest(TWO, harm, PAIRS, ([True, False, False], [False] * 3), 1.0)
    assert [p for p in vetoed.keys if p.owner is not None] == [Side(2, 0)]
    assert all(p.owner is None for p in vetoed.values)


def harm_of(pairs, kappas) -> SharingHarm:
    """Harm that grows with the pair, keys first; codes that agree beyond chance by about ``kappas``."""
    n = len(pairs)
    uniform = torch.full((4, 4), 1000, dtype=torch.int64)
    joint = torch.stack([uniform + torch.eye(4, dtype=torch.int64) * int(40_000 * k) for k in kappas])
    return SharingHarm(
        tuple(pairs),
        torch.arange(2 * n, dtype=torch.float64).view(2, n) + 1.5,
        torch.full((2, n), 0.5, dtype=torch.float64),
        torch.stack([joint, joint]),
        uniform.expand(2, n, 4, 4).clone(),
        "test",
        1,
    )


def context(groups, harm=None) -> SimpleNamespace:
    config = SimpleNamespace(
        num_layers=sum(map(len, groups)), kv_groups=tuple(SimpleNamespace(layers=g) for g in groups)
    )
    return SimpleNamespace(config=config, kv_sharing=harm)


def bound(groups=((0, 1, 2, 3, 4, 5),), harm=None, **options):
    return xquant.bind(make_config(xquant.Config, options, "xquant"), context(groups, harm))


def test_only_what_needs_measuring_waits_for_it() -> None:
    assert bound().calibration == "sharing"
    assert bound(schedule="paper", km=2, min_agreement=0.1).calibration == "sharing"
    assert bound(schedule="paper", km=2).calibration == "none"
    assert bound(schedule="none").calibration == "none"
    assert bound(groups=((0,), (1,))).calibration == "none"  # no pair, nothing to measure


def test_paper_thresholds_are_independent_by_side() -> None:
    made = bound(schedule="paper", km=3, vm=5, lk=4, lv=2)
    assert [s.bits for s in made.schedule.keys] == [2, 2, 2, 2, 1, 1]
    assert [s.bits for s in made.schedule.values] == [2, 2, 1, 1, 1, 1]
    assert [s.owner for s in made.schedule.keys] == [None, None, None, 2, None, 4]
    assert [s.owner for s in made.schedule.values] == [None, None, None, None, None, 4]


def test_harm_decides_and_agreement_vetoes() -> None:
    pairs = pairs_of([range(6)])
    harm = harm_of(pairs, (0.0, 0.5, 0.5))
    made = bound(harm=harm, target=1.5)
    assert [s.owner for s in made.schedule.keys] == [None, 0, None, 2, None, 4]
    assert made.nbytes == harm.nbytes and made.harm is harm
    vetoed = bound(harm=harm, target=1.0, min_agreement=0.2)
    assert [s.owner for s in vetoed.schedule.keys] == [None, None, None, 2, None, 4]
    assert [s.owner for s in vetoed.schedule.values] == [None, None, None, 2, None, 4]
    paper = bound(harm=harm, schedule="paper", km=1, vm=5, min_agreement=0.2)
    assert [s.owner for s in paper.schedule.keys] == [None, None, None, 2, None, 4]
    assert [s.owner for s in paper.schedule.values] == [None] * 5 + [4]


@pytest.mark.parametrize("least", [0.0, 0.2, 0.9])
def test_tables_name_every_side_and_pair(least: float) -> None:
    harm = harm_of(pairs_of([range(6)]), (0.0, 0.5, 0.5))
    rows = harm.table()
    assert [(r["side"], r["layers"]) for r in rows] == [(s, p) for s in "kv" for p in ("0→1", "2→3", "4→5")]
    assert rows[0]["kl_shared"] == 1.5 and rows[3]["kl_own"] == 0.5
    assert harm.increase(1) == [4.0, 5.0, 6.0]
    assert harm.allowed(0, least) == [not least or r["kappa"] >= least for r in rows[:3]]
