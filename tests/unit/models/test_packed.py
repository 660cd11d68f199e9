"""Packed linears: rows that do not depend on their neighbours, honest bytes, one rounding rule."""

import pytest
import torch
from torch.nn import functional as F

from workbench.models import packed
from workbench.models.gated import ACTIVATIONS
from workbench.models.packed import held_nbytes
from workbench.models.plain import fits_float16, plain_pack, sixteen_bit
from workbench.models.weightset import HEAD
from workbench.spec.errors import OptionError

SHAPES = [(48, 32), (96, 1536), (7, 33), (130, 577), (960, 576), (54, 1111)]
ROWS = [*range(1, 41), 64, 256]


def linear(n, k, dtype, numerics="pinned", name="x", bias=True, activation=None):
    torch.manual_seed(n)
    weight, offset = torch.randn(n, k) * k**-0.5, torch.randn(n)
    pack = plain_pack(dtype, numerics, activation=activation)
    return pack(name, weight, offset if bias else None), weight, offset


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "layer"),
        (torch.float32, "layer"),
        (torch.float32, HEAD),
        (torch.bfloat16, "layer"),
        (torch.bfloat16, HEAD),
    ],
)
def test_pinned_rows_have_the_same_bits_whatever_comes_with_them(n, k, dtype, name):
    kernel, _, _ = linear(n, k, dtype, name=name)
    x = torch.randn(256, k, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    whole = kernel(x)
    for rows in ROWS:
        for start in (0, 3) if rows < 256 else (0,):
            # Views and copies: neither the place in a tile nor the address may matter.
            part = x[start : start + rows]
            assert torch.equal(kernel(part), whole[start : start + rows]), (rows, start)
            assert torch.equal(kernel(part.clone()), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize("numerics", ["pinned", "fast"])
def test_rounding_to_bfloat16_does_not_hide_another_order_of_summing(numerics):
    """Enough sums that some lie next to a rounding boundary; the fast kernel is the negative control."""
    kernel, _, _ = linear(4096, 1536, torch.bfloat16, numerics, bias=False)
    x = torch.randn(64, 1536)
    whole = kernel(x)
    same = all(torch.equal(kernel(x[row : row + 1]), whole[row : row + 1]) for row in range(16))
    if numerics == "pinned":
        assert same
        assert torch.equal(kernel(x[5:16]), whole[5:16])
    elif kernel.kernel == "oneDNN bf16":
        assert not same


def test_a_bare_gemm_lacks_what_tiles_give():
    """The negative control: without tiles the same float64 row differs between row counts."""
    torch.manual_seed(0)
    weight, x = torch.randn(960, 576, dtype=torch.float64), torch.randn(64, 576, dtype=torch.float64)
    bare = packed.dense(weight, None, pinned=False)
    changed = [rows for rows in ROWS if rows <= 64 and not torch.equal(bare(x[:rows]), bare(x)[:rows])]
    tiles = packed.dense(weight, None, pinned=True)
    assert all(torch.equal(tiles(x[:rows]), tiles(x)[:rows]) for rows in ROWS if rows <= 64)
    if torch.backends.mkl.is_available():
        assert changed


@pytest.mark.parametrize("numerics", ["fast", "pinned"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 8, 33])
def test_values_are_the_linear_layers(numerics, bias, rows):
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 5e-6)):
        kernel, weight, offset = linear(130, 577, dtype, numerics, bias=bias)
        x = torch.randn(rows, 577, dtype=torch.float64)
        got = kernel(x if dtype is torch.float64 else x.float())
        expected = F.linear(x, weight.double(), offset.double() if bias else None)
        assert got.shape == (rows, 130)
        assert (got - expected).abs().max() < bound


@pytest.mark.parametrize("numerics", ["fast", "pinned"])
@pytest.mark.parametrize("name", ["layer", HEAD])
@pytest.mark.parametrize("rows", [1, 9, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_sixteen_bit_follows_its_rule(name, rows, bias, numerics):
    """Stored weights and activations rounded once; sums in float32; layer outputs rounded once more."""
    kernel, weight, offset = linear(130, 577, torch.bfloat16, numerics, name=name, bias=bias)
    x = torch.randn(rows, 577)
    stored = sixteen_bit(weight).double()
    exact = F.linear(x.bfloat16().double(), stored, offset.bfloat16().double() if bias else None)
    got = kernel(x)
    assert got.dtype is (torch.float32 if name == HEAD else torch.bfloat16)
    slack = 577 * 2**-24 * F.linear(x.abs().double(), stored.abs()).max()
    rounding = 0 if name == HEAD and "FBGEMM" in kernel.kernel else 2**-8 * exact.abs()
    assert bool(((got - exact).abs() <= slack + rounding).all())
    if name != HEAD:
        assert torch.equal(got, got.bfloat16().float())


def test_sixteen_bit_values_are_exact_in_both_formats():
    torch.manual_seed(0)
    weight = torch.cat((torch.randn(4096), torch.randn(4096) * 2**-18, torch.tensor([0.0, -0.0, 65_280.0])))
    stored = sixteen_bit(weight)
    assert torch.equal(stored.half().bfloat16(), stored)
    plain = weight.bfloat16()
    normal = plain.abs() >= 2**-14
    assert torch.equal(stored[normal], plain[normal])
    assert (stored.float() - weight).abs()[~normal].max() <= 2**-24


def test_weights_beyond_float16_keep_their_value_on_another_kernel():
    weight = torch.full((16, 32), 70_000.0)
    assert not fits_float16(weight)
    kernel = plain_pack(torch.bfloat16)(HEAD, weight, None)
    assert kernel.kernel != "FBGEMM fp16"
    expected = 32 * weight.bfloat16()[0, 0].double()
    assert kernel(torch.ones(1, 32))[0, 0].item() == pytest.approx(expected, rel=2**-8)


def test_bytes_count_packed_forms_and_shared_storages_once():
    weight = torch.randn(48, 32)
    shared = plain_pack(torch.float32)(HEAD, weight, None)
    assert held_nbytes([shared], [weight]) == weight.nbytes
    packed_layer = plain_pack(torch.float32)("layer", weight, None)
    assert held_nbytes([packed_layer]) >= weight.nbytes
    sixteen = plain_pack(torch.bfloat16)("layer", weight, torch.zeros(48))
    assert held_nbytes([sixteen]) >= 2 * weight.numel() + 2 * 48
    assert held_nbytes([sixteen, sixteen]) == held_nbytes([sixteen])


def test_other_dtypes_are_refused():
    with pytest.raises(OptionError, match="float16"):
        plain_pack(torch.float16)


@pytest.mark.parametrize("numerics", ["fast", "pinned"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("rows", [1, 9, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_linear_follows_one_rule_in_both_classes(rows, activation, numerics, bias):
    """float32 sums; the activated gate and the product are each rounded once."""
    kernel, weight, offset = linear(130, 577, torch.bfloat16, numerics, "mlp.gate_up_proj", bias, activation)
    assert kernel.gated and (kernel.n, kernel.k) == (130, 577)
    x = torch.randn(rows, 577)
    shift = offset.bfloat16().double() if bias else None
    sums = F.linear(x.bfloat16().double(), sixteen_bit(weight).double(), shift)
    gate, up = sums.chunk(2, -1)
    gate = ACTIVATIONS[activation](gate)
    got = kernel(x)
    assert got.shape == (rows, 65) and got.dtype is torch.bfloat16
    # Two half-ulp roundings of the product; the sums themselves err by far less.
    assert bool(((got - gate * up).abs() <= 2**-7 * (gate * up).abs() + 2e-5).all())


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_a_pinned_gated_linear_does_not_look_at_the_other_rows(activation):
    kernel, _, _ = linear(96, 1536, torch.bfloat16, "pinned", "mlp.gate_up_proj", True, activation)
    x = torch.randn(64, 1536)
    whole = kernel(x)
    for rows in range(1, 41):
        assert torch.equal(kernel(x[3 : 3 + rows]), whole[3 : 3 + rows]), rows


def test_without_an_activation_the_rows_stay_linear():
    kernel, _, _ = linear(130, 577, torch.bfloat16, "fast", "mlp.gate_up_proj")
    assert not kernel.gated and kernel(torch.randn(3, 577)).shape == (3, 130)
