"""Torch's default dtype is the process's: a user, or a library that loads a model, may change it at any time.

Kernels write through plain pointers, so memory of another dtype than they take would be written past its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from types import ModuleType

import pytest
import torch

import workbench.attention.compiled as attention
from workbench.core import catalog
from workbench.core.plan_machine import machine_conflicts
from workbench.engine.seams import AttentionShape, AttentionSpan
from workbench.kv import compiled as codes
from workbench.models.compiled import linear


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def another_default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    codes._ones.cache_clear()
    yield request.param
    torch.set_default_dtype(before)
    codes._ones.cache_clear()


def test_products_are_float32(compiled_kernels: CDLL, another_default: torch.dtype) -> None:
    weight = torch.eye(64, dtype=torch.float32)
    x = torch.arange(3 * 64, dtype=torch.float32).view(3, 64)
    got = linear(compiled_kernels, weight, None, rounded=False)(x)
    assert got.dtype is torch.float32 and torch.equal(got, x)


@pytest.mark.parametrize("rows", [1, 40])
def test_attention_is_float32(compiled_kernels: CDLL, another_default: torch.dtype, rows: int) -> None:
    shape = AttentionShape(4, 2, 64, 16)
    span = AttentionSpan(rows, 0, (1, 2, 3), tuple(range(rows)), None)
    pool = torch.ones(4, 2, 16, 64, dtype=torch.bfloat16)
    op = attention.CompiledPages(compiled_kernels)
    got = op.run(op.prepare([span], shape), torch.zeros(rows, 4, 64, dtype=torch.float32), pool, pool)
    assert got.dtype is torch.float32 and torch.equal(got, torch.ones_like(got))


def test_codes_without_scales_are_themselves(compiled_kernels: CDLL, another_default: torch.dtype) -> None:
    stored = torch.arange(-64, 64, dtype=torch.int8).view(1, 2, 4, 16)
    out = torch.empty(1, 2, 4, 16, dtype=torch.bfloat16)
    codes.decode_bytes(compiled_kernels, stored, None, None, torch.tensor([0]), out)
    assert torch.equal(out, stored.bfloat16())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("use", ["kv_fp8:scale=unit", "curdkv:keep=0.5", "rtn"])
def test_a_recipe_says_the_same(lab: ModuleType, another_default: torch.dtype, family: str, use: str) -> None:
    if machine_conflicts(catalog.get("compiled").spec, "bfloat16", "fast"):
        pytest.skip("needs 64-bit Linux and a C++ compiler")
    said = []
    for dtype in (torch.float32, another_default):
        torch.set_default_dtype(dtype)
        lab._decoder.cache_clear()
        made = lab.make_engine("paged", "compiled", use, family=family, dtype="bfloat16", numerics="fast")
        said.append(lab.run_engine(made, lab.prompts_of(2, low=30), max_tokens=12))
    assert [said[0].ids(f"r{i}") for i in range(2)] == [said[1].ids(f"r{i}") for i in range(2)]
