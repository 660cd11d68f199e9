"""FlashAttention-3 in FP8: against float64 on the stored values, the gain on outliers, the paper's sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention import fp8_prepare
from workbench.kernels.attention.fa3_fwd import fa3_fwd
from workbench.kernels.attention.fa3_fwd_fp8 import cost, fa3_fwd_fp8, reference
from workbench.kernels.attention.fp8_blocks import BLOCK, Fp8Blocks, packed_table
from workbench.kernels.attention.fp8_error import exact as exact_attention
from workbench.kernels.attention.fp8_error import outliers
from workbench.kernels.attention.fp8_simulate import simulated
from workbench.kernels.bench.case import Case, Goal, Lab, Outputs, Relation, Trial
from workbench.kernels.bench.cases.fp8_prepare import on
from workbench.kernels.emulator import Emulator

NAME = "fa3_fwd_fp8"


def _run(emulated: bool, x: Fp8Blocks, bf16: Any = None, **options: Any) -> Outputs:
    found = fa3_fwd_fp8(x, **options, emulator=Emulator() if emulated else None)
    return {"out": found.out, "lse": found.lse}


def make(
    lab: Lab, *, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, **options: Any
) -> Trial:
    """Rotated and quantized as the library does; on a CPU the emulator runs the kernel."""
    q = lab.normal(sum(q_lens), heads, dim).cpu()
    k, v = (lab.normal(sum(kv_lens), kv_heads, dim).cpu() for _ in range(2))
    x = fp8_prepare.reference(q, k, v, q_lens, kv_lens, fp8_prepare.random_signs(dim, lab.seed % 1000))
    masks = {n: options[n] for n in ("causal", "window", "softcap") if n in options}

    def exact() -> Outputs:
        return {n: y.to(lab.device) for n, y in zip(("out", "lse"), reference(x, **masks), strict=True)}

    def plain() -> Outputs:
        if set(masks) - {"causal"}:
            return {}
        out, _ = simulated(x, **masks)
        return {"out": out.bfloat16().to(lab.device)}

    arguments = {"x": on(x, lab.device), **options}
    # E4M3 has 3 bits after the point: P is off by 2^-4 at most, at random, in every product.
    return Trial(arguments, functools.partial(_run, not lab.on_gpu), exact, plain,
                 within={"out": 4e-2, "lse": 1e-4}, launches=True)  # fmt: skip


def make_outliers(lab: Lab, *, length: int, dim: int) -> Trial:
    """The paper's data; the figure is per-tensor scales' error over that of block scales and rotation."""
    generator = torch.Generator().manual_seed(lab.seed)
    q, k, v = (outliers(length, dim, generator).bfloat16() for _ in range(3))
    lens = [length]
    rows = [x[:, None] for x in (q, k, v)]
    truth = exact_attention(q, k, v)
    run = functools.partial(_run, not lab.on_gpu, causal=False)
    signs = fp8_prepare.random_signs(dim, lab.seed % 1000)
    good = on(fp8_prepare.reference(*rows, lens, lens, signs), lab.device)
    usual = on(fp8_prepare.reference(*rows, lens, lens, None, per_tensor=True), lab.device)

    def error(x: Fp8Blocks) -> float:
        return float((run(x=x)["out"][:, 0].cpu().double() - truth).norm())

    def call(x: Fp8Blocks) -> Outputs:
        return {"out": run(x=x)["out"]}

    return Trial(
        {"x": good},
        call,
        exact=lambda: {"out": reference(on(good, "cpu"), causal=False)[0].to(lab.device)},
        plain=lambda: {"out": simulated(on(good, "cpu"), causal=False)[0].bfloat16().to(lab.device)},
        figures=lambda: {"error gain": error(usual) / error(good)},
    )


def make_timed(lab: Lab, *, length: int, heads: int, dim: int, causal: bool, two_level: bool) -> Trial:
    """Codes of normal numbers in the kernel's order; beside it the bf16 kernel at the same sizes."""
    lens, pages = [length] * (16384 // length), 16384 // BLOCK
    q, k, v = (lab.normal(16384, heads, dim) for _ in range(3))
    code = torch.float8_e4m3fn
    one = torch.ones((pages, heads), device=lab.device)
    x = Fp8Blocks(
        q.to(code), one, k.unflatten(0, (pages, BLOCK)).transpose(1, 2).contiguous().to(code), one.clone(),
        v.unflatten(0, (pages, BLOCK)).permute(0, 2, 3, 1).contiguous().to(code), one.clone(),
        packed_table(lens).to(lab.device), tuple(lens), tuple(lens),
    )  # fmt: skip

    def sixteen(x: Any, bf16: tuple[Tensor, ...], **_: Any) -> Outputs:
        fa3_fwd(*bf16, lens, lens, causal=causal)
        return {}

    arguments = {"x": x, "bf16": (q, k, v), "causal": causal, "two_level": two_level}
    return Trial(arguments, functools.partial(_run, False), dict, launches=True,
                 baselines={"fa3_fwd bf16, whole call": sixteen})  # fmt: skip


def _check(name: str, **sizes: Any) -> Case:
    known = ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "causal", "window")
    return Case(NAME, name, make, sizes, cost(**{n: sizes[n] for n in known if n in sizes}), unit="fp8")


def _timed(dim: int, length: int, *marks: float, causal: bool = False, two_level: bool = False,
           variants: Any = None) -> Case:  # fmt: skip
    lens, heads = [length] * (16384 // length), 2048 // dim
    work = cost(q_lens=lens, kv_lens=lens, heads=heads, kv_heads=heads, dim=dim, causal=causal)
    words = ["causal"] * causal + ["two-level"] * two_level
    name = " ".join([f"hd{dim}", *words, f"{length // 1024}k"])
    sizes = {"length": length, "heads": heads, "dim": dim, "causal": causal, "two_level": two_level}
    return Case(NAME, name, make_timed, sizes, work, timed=True, unit="fp8", variants=variants or {},
                goals=(Goal(*marks),) if marks else ())  # fmt: skip


RELATIONS = (Relation("one level of sums against two", "hd128 16k", "hd128 two-level 16k"),)
_GAIN = {"length": 4096, "dim": 128}
CASES = (
    _check("one tile", q_lens=[64], kv_lens=[128], heads=1, kv_heads=1, dim=64, causal=False),
    _check("ragged", q_lens=[130, 5, 1], kv_lens=[130, 300, 129], heads=4, kv_heads=1, dim=64),
    _check("hd128", q_lens=[512], kv_lens=[512], heads=4, kv_heads=2, dim=128, causal=False),
    _check("hd128 causal GQA 8", q_lens=[700], kv_lens=[1500], heads=8, kv_heads=1, dim=128),
    _check("two-level", q_lens=[700], kv_lens=[1500], heads=4, kv_heads=2, dim=128, two_level=True),
    _check("two-level, wide", q_lens=[700], kv_lens=[1500], heads=4, kv_heads=2, dim=128, two_level=True,
           wide=True),
    _check("window", q_lens=[600], kv_lens=[900], heads=4, kv_heads=2, dim=128, window=300),
    _check("soft-cap", q_lens=[600], kv_lens=[900], heads=4, kv_heads=2, dim=128, softcap=20.0),
    Case(NAME, "outliers, N=4096", make_outliers, _GAIN, cost(q_lens=[4096], kv_lens=[4096], heads=1,
         kv_heads=1, dim=128, causal=False), unit="fp8", goals=(Goal(1.7, 1.9, 2.6, of="error gain"),)),
    _timed(128, 16384, 700, 880, 1000),
    _timed(128, 16384, 600, 750, 850, two_level=True, variants={"KV tile 128": {"wide": True}}),
    _timed(128, 16384, causal=True),
    _timed(64, 16384),
)  # fmt: skip
