"""Norms, joined streams and coded weights of the compiled kernels against float64; a chain in both forms."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from workbench.engine.techniques import compiled
from workbench.models.compiled import linear
from workbench.models.compiled_join import compiled_joined, compiled_norm
from workbench.models.plain import sixteen_bit
from workbench.quant.compiled import coded_linear, fits
from workbench.quant.grid import round_to_nearest
from workbench.speculative import feature_head

ROWS = (1, 2, 3, 13, 37)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()


@pytest.mark.parametrize("width", [1, 7, 33, 64, 576])
def test_a_norm_is_that_of_its_formula(compiled_kernels: CDLL, width: int) -> None:
    gain, eps = drawn(width), 1e-5
    norm = compiled_norm(compiled_kernels, gain, eps)
    for m in ROWS:
        x = drawn(m, width, seed=m) * 3
        exact = normed(x, gain, eps)
        assert (norm(x) - exact).abs().max() < 3e-6 * (1 + exact.abs().max())
    assert norm(drawn(0, width)).shape == (0, width)


@pytest.mark.parametrize("gains", [(True,), (False, False), (True, True), (True, False, True), (True,) * 4])
@pytest.mark.parametrize("width", [7, 32, 65])
def test_joined_parts_are_multiplied_side_by_side(
    compiled_kernels: CDLL, width: int, gains: tuple[bool, ...]
) -> None:
    """Odd widths too: what fills a row up to pairs belongs to no other row."""
    parts, n, eps = len(gains), 48, 1e-6
    weight, bias = drawn(n, parts * width) / (parts * width) ** 0.5, drawn(n, seed=1)
    made = linear(compiled_kernels, weight, bias, rounded=True)
    kept = [drawn(width, seed=i) if g else None for i, g in enumerate(gains)]
    run = compiled_joined(kept, eps, made.native)
    for m in ROWS:
        rows = [drawn(m, width, seed=10 * m + i) for i in range(parts)]
        joined = torch.cat(
            [x.double() if g is None else normed(x, g, eps) for x, g in zip(rows, kept, strict=True)], 1
        )
        exact = joined.bfloat16().double() @ sixteen_bit(weight).double().T + bias.bfloat16().double()
        got = run(*rows)
        assert got.dtype is torch.float32 and torch.equal(got, got.bfloat16().float())
        assert (got - exact).abs().max() < 2**-6 * (1 + exact.abs().max())
        halves = [run(*(x[i : i + 1] for x in rows)) for i in range(m)]
        assert (torch.cat(halves) - got).abs().max() <= 2**-7 * (1 + got.abs().max())


@pytest.mark.parametrize("bits,group", [(4, 32), (4, 64), (4, 16), (8, 64), (8, -1), (4, -1)])
@pytest.mark.parametrize("n,k", [(96, 64), (70, 192), (33, 320)])
def test_coded_weights_are_their_values_for_every_number_of_rows(
    compiled_kernels: CDLL, n: int, k: int, bits: int, group: int
) -> None:
    """One row is unpacked in registers, several come from the first-level cache."""
    grid, bias = round_to_nearest(drawn(n, k), bits, group), drawn(n, seed=2)
    assert fits(grid)
    made = coded_linear(compiled_kernels, grid, bias, "layer", "silu")
    for m in ROWS:
        x = drawn(m, k, seed=m)
        exact = x.bfloat16().double() @ grid.values(torch.float64).T
        got = made(x) - bias
        assert (got - exact).abs().max() < 2**-7 * (1 + exact.abs().max())


@pytest.fixture
def engines(
    compiled_kernels: CDLL,
    lab: ModuleType,
    random_heads: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ModuleType]:
    """Engines of random models on these kernels, with a random EAGLE-3 head."""
    monkeypatch.setattr(compiled, "kernels", lambda: compiled_kernels)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    source = lab.random_source("llama")
    tensors = random_heads.eagle3(source.config)
    random_heads.put(
        tmp_path, "random-llama", "eagle3", source.fingerprint, tensors, features=[0, 1, 2], layers=1
    )
    lab._decoder.cache_clear()
    with torch.inference_mode():
        yield lab
    lab._decoder.cache_clear()


@pytest.mark.parametrize("bits", [4, 16])
def test_a_chain_is_that_of_single_steps(
    engines: ModuleType, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    prompts = engines.prompts_of(4, seed=6, low=4, high=30)
    said = []
    for one_call in (True, False):
        if not one_call:
            monkeypatch.setattr(feature_head, "chain_program", lambda decoder, ids: None)
        engine = engines.make_engine(
            "paged",
            "compiled",
            f"eagle3:depth=3,vocab=50,bits={bits}",
            page_size=4,
            dtype="bfloat16",
            numerics="fast",
        )
        assert (engine.drafting.drafter._program is not None) == one_call
        ran = engines.run_engine(engine, prompts, max_tokens=14, ignore_eos=True)
        said.append([(d.request_id, d.tokens, d.accepted) for s in ran.steps for d in s.drafts])
    assert said[0] == said[1] and len(said[0]) > 20
