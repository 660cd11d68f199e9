"""XQuant's page codec against a float64 oracle of the paper, against KIVI, and against the byte formula."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from workbench.engine.seams import PageGeometry
from workbench.engine.store import PageStore
from workbench.kv import xquant
from workbench.kv.kivi import KiviCodec
from workbench.kv.plain import PlainCodec
from workbench.kv.xquant.codec import XQuantCodec, inward
from workbench.kv.xquant.schedule import Schedule, Side, sides
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import make_config

LAYERS, HEADS, PAGE, DIM, GROUP = 4, 2, 64, 32, 16
GEOMETRY = PageGeometry(LAYERS, HEADS, DIM, PAGE, 3, torch.float32)
WHERE = torch.tensor([3, 1])


def codec(k: Schedule | tuple[Side, ...], v: tuple[Side, ...] = (), **options) -> XQuantCodec:
    schedule = k if isinstance(k, Schedule) else Schedule(k, v or k)
    return XQuantCodec(schedule, schedule, group=GROUP, residual=PAGE, **options)


def store_of(made: XQuantCodec, layers: int = LAYERS, known: int = LAYERS) -> PageStore:
    plain = PlainCodec(torch.float32)
    return PageStore(made, plain, replace(GEOMETRY, layers=layers), range(known))


def fill(store: PageStore, rows: torch.Tensor) -> None:
    """Rows [layers, 2, tokens, H, D] into pages 3 and 1, token by token, as two commits."""
    for i, page in enumerate(WHERE.tolist()):
        store.reset([page])
        slots = torch.arange(PAGE) + page * PAGE
        store.plan_read([page])
        where = store.begin(slots, torch.arange(PAGE) + i * PAGE)
        for layer, (k, v) in enumerate(rows[:, :, i * PAGE : (i + 1) * PAGE]):
            store.write(layer, where, k, v)
        store.fill([page])


def read(store: PageStore, layer: int) -> torch.Tensor:
    """K and V [2, tokens, H, D] as attention would see them."""
    k, v = store.read(layer, store.plan_read(WHERE.tolist()))
    return torch.stack([k, v]).transpose(2, 3).flatten(1, 2).clone()


def oracle_grid(x: np.ndarray, bits: int, eta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes and the moved grid of groups along the last axis, float64, section 3 of the paper."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    step = (high - low) / (2**bits - 1)
    codes = np.round((x - low) / step)
    return codes, low + eta * step * (2**bits - 1), (1 - 2 * eta) * step


def groups(x: np.ndarray, side: int) -> np.ndarray:
    """[T, H, D] with a group last: tokens of a channel for keys, channels of a token for values."""
    tokens, heads, dim = x.shape
    if side == 0:
        return x.reshape(tokens // GROUP, GROUP, heads, dim).transpose(0, 2, 3, 1)
    return x.reshape(tokens, heads, dim // GROUP, GROUP)


def ungroup(x: np.ndarray, side: int) -> np.ndarray:
    if side == 0:
        return x.transpose(0, 3, 1, 2).reshape(-1, HEADS, DIM)
    return x.reshape(-1, HEADS, DIM)


@pytest.mark.parametrize("etas", [(0.0, 0.0), (1 / 6, 0.045), (1 / 3, 0.09)])
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_float64_oracle(bits: int, etas: tuple[float, float], shared: bool, seeded: None) -> None:
    rows = torch.randn(LAYERS, 2, 2 * PAGE, HEADS, DIM)
    made = codec(sides([bits] * LAYERS, [(0, 1)] if shared else ()), eta1=etas[0], eta2=etas[1])
    store = store_of(made)
    fill(store, rows)
    for layer in range(LAYERS):
        got = read(store, layer).double().numpy()
        for side in range(2):
            own, low, step = oracle_grid(
                groups(rows[layer, side].double().numpy(), side), bits, etas[bits == 2]
            )
            partner = groups(rows[0, side].double().numpy(), side)
            codes = oracle_grid(partner, bits, 0)[0] if shared and layer == 1 else own
            want = ungroup(low + codes * step, side)
            # Minimum and step are stored in float16. Where that moves an element over the middle between two
            # codes, it lands on the neighbour: those are as far from either, so the error bound says it.
            reach = np.abs(ungroup(np.broadcast_to(np.abs(low) + 4 * step, own.shape), side)) * 2**-9
            tie = np.abs(got[side] - want) > reach
            x = partner if shared and layer == 1 else groups(rows[layer, side].double().numpy(), side)
            exact = (x - x.min(-1, keepdims=True)) / ((np.ptp(x, -1, keepdims=True)) / (2**bits - 1))
            middle = np.abs(ungroup(exact - np.floor(exact), side) - 0.5) < 0.02
            assert (~tie | middle).all() and tie.mean() < 0.01


@pytest.mark.parametrize("group", [8, 16, 32])
def test_without_eta_and_sharing_it_is_kivi_bit_for_bit(group: int, seeded: None) -> None:
    rows = torch.randn(LAYERS, 2, 2 * PAGE, HEADS, DIM) * 10
    rows[2, :, :PAGE] = 0
    base = Schedule((Side(2),) * LAYERS, (Side(2),) * LAYERS)
    mine = store_of(XQuantCodec(base, base, eta1=0.2, eta2=0.0, group=group, residual=PAGE))
    theirs = PageStore(KiviCodec(2, group, PAGE), PlainCodec(torch.float32), GEOMETRY)
    for store in (mine, theirs):
        fill(store, rows)
    names = {"k2": "k", "v2": "v"}
    assert {names.get(n, n) for n in mine.planes} == set(theirs.planes)
    for name, plane in mine.planes.items():
        assert torch.equal(plane, theirs.planes[names.get(name, name)])
    for layer in range(LAYERS):
        assert torch.equal(read(mine, layer), read(theirs, layer))
    assert mine.nbytes() == theirs.nbytes()


SCHEDULES = {
    "none": sides([2, 2, 2, 2], ()),
    "one bit behind": sides([2, 2, 1, 1], ()),
    "pair": sides([2, 2, 2, 2], [(2, 3)]),
    "pair over widths": sides([2, 1, 1, 1], [(0, 1), (2, 3)]),
}


@pytest.mark.parametrize("k", SCHEDULES)
@pytest.mark.parametrize("v", SCHEDULES)
def test_bytes_are_the_formula_and_sharers_hold_no_codes(k: str, v: str) -> None:
    made = codec(Schedule(SCHEDULES[k], SCHEDULES[v]))
    assert made.schedule is not None
    store = store_of(made)
    elements = LAYERS * 2 * HEADS * PAGE * DIM * (GEOMETRY.pages + 1)
    held = store.nbytes()
    bits = made.schedule.code_bits
    assert Fraction(8 * held["kv_payload"], elements) == bits
    metadata = held["kv_meta"] - store.positions.untyped_storage().nbytes()
    assert Fraction(8 * metadata, elements) == Fraction(32, GROUP)  # in every layer, sharers included
    for side, table in (("k", SCHEDULES[k]), ("v", SCHEDULES[v])):
        for width in (1, 2):
            owners = [i for i, s in enumerate(table) if s == Side(width)]
            plane = store.planes.get(f"{side}{width}")
            assert (0 if plane is None else plane.shape[0]) == len(owners)
        for layer, s in enumerate(table):
            mine = store._layers[layer][f"{side}{s.bits}"]
            theirs = store._layers[layer if s.owner is None else s.owner][f"{side}{s.bits}"]
            assert mine.data_ptr() == theirs.data_ptr()


def test_a_sharer_reads_its_partners_codes_with_parameters_of_its_own_data(seeded: None) -> None:
    rows = torch.randn(LAYERS, 2, 2 * PAGE, HEADS, DIM)
    made = codec(sides([2] * LAYERS, [(0, 1)]), eta2=0.0)
    store = store_of(made)
    fill(store, rows)
    before = read(store, 1)
    # Ten times layer 1 is ten times its grid; layer 0, and the codes, do not notice.
    first = read(store, 0)
    rows[1] *= 10
    fill(store, rows)
    assert torch.equal(read(store, 0), first)
    assert torch.allclose(read(store, 1), 10 * before, rtol=2**-8, atol=2**-6)
    # And another layer 0 is other codes.
    rows[0] = rows[0].flip(1)
    fill(store, rows)
    assert not torch.allclose(read(store, 1), 10 * before, rtol=0.1)


def test_constant_groups_stay_exact_with_eta_and_under_anothers_codes(seeded: None) -> None:
    rows = torch.randn(LAYERS, 2, 2 * PAGE, HEADS, DIM)
    rows[1], rows[2] = 0.0, 0.0
    for eta, parameters in ((0.0, "range"), (0.045, "range"), (0.45, "range"), (0.0, "fit")):
        store = store_of(codec(sides([2] * LAYERS, [(0, 1)]), eta2=eta, parameters=parameters))
        fill(store, rows)
        assert (read(store, 1) == 0).all() and (read(store, 2) == 0).all()


def test_the_grid_moves_inward_by_eta_of_the_range() -> None:
    low, step = torch.tensor([-1.0]).half(), torch.tensor([2.0]).half()
    moved, narrower = inward(low, step, 1, 1 / 6)  # levels at 1/6 and 5/6 of [-1, 1]
    assert float(moved) == pytest.approx(-2 / 3, abs=1e-3)
    assert float(moved + narrower) == pytest.approx(2 / 3, abs=1e-3)
    assert inward(low, step, 2, 0.0) == (low, step)


@pytest.mark.parametrize("bits", [1, 2])
def test_fitted_parameters_are_least_squares_on_the_partners_codes(bits: int, seeded: None) -> None:
    rows = torch.randn(LAYERS, 2, 2 * PAGE, HEADS, DIM) + 1
    rows[1, :, :PAGE] = -0.5 * rows[0, :, :PAGE]  # a page whose codes say all about layer 1
    plain, fit = (store_of(codec(sides([bits] * LAYERS, [(0, 1)]), parameters=p)) for p in ("range", "fit"))
    for store in (plain, fit):
        fill(store, rows)
    assert torch.equal(read(plain, 0), read(fit, 0))
    assert plain.nbytes() == fit.nbytes()
    errors = [(read(store, 1) - rows[1]).square() for store in (plain, fit)]
    for page in (slice(0, PAGE), slice(PAGE, None)):
        for side in range(2):
            assert errors[1][side, page].mean() < 0.6 * errors[0][side, page].mean()
    got = read(fit, 1).double().numpy()
    for side in range(2):
        c = oracle_grid(groups(rows[0, side].double().numpy(), side), bits, 0)[0].reshape(-1, GROUP)
        x = groups(rows[1, side].double().numpy(), side).reshape(-1, GROUP)
        want = np.stack([np.polyval(np.polyfit(a, b, 1), a) for a, b in zip(c, x, strict=True)])
        near = np.abs(got[side] - ungroup(want.reshape(groups(got[side], side).shape), side))
        assert np.quantile(near, 0.99) < 0.01  # a code on the middle may fall to either side


@pytest.mark.parametrize("bits", [1, 2])
def test_eta_lowers_the_error_of_normal_rows(bits: int, seeded: None) -> None:
    rows = torch.randn(LAYERS, 2, 2 * PAGE, HEADS, DIM)
    errors = []
    for etas in ((0.0, 0.0), (1 / 6, 0.045)):
        store = store_of(codec(sides([bits] * LAYERS, ()), eta1=etas[0], eta2=etas[1]))
        fill(store, rows)
        errors.append(float((read(store, 0) - rows[0]).square().mean()))
    assert errors[1] < 0.9 * errors[0]


def test_layers_of_a_drafter_take_no_part(seeded: None) -> None:
    """They follow the model's: two bits, codes of their own, whatever the schedule."""
    made = codec(sides([1] * LAYERS, [(0, 1), (2, 3)]))
    store = store_of(made, layers=LAYERS + 1)
    rows = torch.randn(LAYERS + 1, 2, 2 * PAGE, HEADS, DIM)
    fill(store, rows)
    alone = store_of(codec(sides([2], ())), layers=1, known=1)
    fill(alone, rows[-1:])
    assert torch.equal(read(store, LAYERS), read(alone, 0))
    assert store.planes["k2"].shape[0] == 1 and store.planes["k1"].shape[0] == 2


def test_codes_are_what_is_stored(seeded: None) -> None:
    k, v = torch.randn(2, 2, HEADS, PAGE, DIM)
    for bits in (1, 2):
        bound = codec(sides([bits], ()), eta1=0.0, eta2=0.0).at(0)
        planes = {p.name: torch.zeros(2, *p.shape, dtype=p.dtype) for p in bound.planes(GEOMETRY)}
        bound.encode(planes, torch.arange(2), k, v)
        back = torch.empty_like(k), torch.empty_like(v)
        bound.decode(planes, torch.arange(2), *back)
        for codes, x in zip(bound.codes(k, v), back, strict=True):
            assert codes.dtype == torch.uint8 and set(codes.unique().tolist()) == set(range(2**bits))
            assert codes.shape == x.shape
        low, step = (planes[f"v_{n}"].float() for n in ("min", "step"))
        grid = bound.codes(k, v)[1].view(2, HEADS, PAGE, DIM // GROUP, GROUP) * step + low
        assert torch.allclose(grid.view_as(v), back[1])


def test_sizes_that_do_not_divide_and_use_before_calibration_are_refused() -> None:
    base = Schedule((Side(2),), (Side(2),))
    made = XQuantCodec(base, base, group=32, residual=64)
    with pytest.raises(OptionError, match=r"xquant\.residual = 48"):
        XQuantCodec(base, base, group=32, residual=48)
    with pytest.raises(OptionError, match="head size 40"):
        made.page_sizes(40)
    with pytest.raises(OptionError, match="head size 40"):
        made.planes(replace(GEOMETRY, head_dim=40))
    with pytest.raises(OptionError, match="page size is 128"):
        made.planes(replace(GEOMETRY, page_size=128))
    waiting = XQuantCodec(base, None)
    assert waiting.calibration == "sharing" and made.calibration == "none"
    with pytest.raises(InvariantError, match="calibrated"):
        waiting.at(0)
    for bad in ({"eta2": 0.5}, {"group": 24}, {"schedule": "all"}, {"lk": 1.5}):
        with pytest.raises(OptionError):
            make_config(xquant.Config, bad, "xquant")


def test_keys_tell_schedules_and_grids_apart() -> None:
    tables = [Schedule(SCHEDULES[k], SCHEDULES[v]) for k in SCHEDULES for v in SCHEDULES]
    keys = {codec(t, eta1=a, eta2=b).key for t in tables for a in (0.0, 0.2) for b in (0.0, 0.05)}
    assert len(keys) == 4 * len(tables)
