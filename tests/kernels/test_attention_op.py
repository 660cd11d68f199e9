"""The engine's attention on the kernels: mixed batches over poisoned pages, against float64 and torch."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.attention import triton as technique
from workbench.attention.kernel_pages import KernelPages
from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.engine.seams import AttentionSpan


def _cases() -> Any:
    """The random batches of the attention tests; test files do not import one another."""
    path = Path(__file__).parents[1] / "unit" / "attention" / "conftest.py"
    spec = importlib.util.spec_from_file_location("attention_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


random_case = _cases().random_case


@dataclass
class Context:
    """What a technique may know when it binds."""

    @dataclass
    class Sizes:
        head_dim: int
        kv_groups: tuple[()] = ()

    config: Sizes
    dtype: torch.dtype
    numerics: str
    device: torch.device
    page_size: int


def bound(
    device: str, dtype: torch.dtype, *, head_dim: int = 64, page: int = 16, numerics: str = "fast"
) -> Any:
    context = Context(Context.Sizes(head_dim), dtype, numerics, torch.device(device), page)
    return technique.bind(technique.Config(), context)


MIXES = {
    "decodes": ["decode"] * 5,
    "chunk and decodes": ["decode", "chunk", "decode"],
    "chains": ["chain", "chain", "decode"],
    "trees": ["tree", "decode", "tree"],
    "everything": ["tree", "decode", "chunk", "chain"],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_batches_err_no_more_than_plain_torch(mix: str, dtype: torch.dtype, device: str) -> None:
    case = random_case(len(mix), MIXES[mix], page=16, head_dim=64, group=4, shared=2, poison=float("nan")).to(
        dtype
    )
    op = bound(device, dtype)
    assert isinstance(op, KernelPages)
    exact = case.oracle()
    error, allowed = ((case.run(o).double() - exact).norm() for o in (op, TorchPages(device)))
    # float32 sums of a few hundred terms in another order: a floor where torch happens to be nearly exact
    assert error <= 2 * allowed + 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("window", "soft_cap"), [(5, None), (40, None), (None, 2.0), (24, 3.0)], ids=lambda x: str(x)
)
def test_windows_and_caps(window: int | None, soft_cap: float | None, device: str) -> None:
    kinds = ["decode", "chunk", "chain", "tree"]
    case = random_case(3, kinds, page=16, head_dim=64, window=window, soft_cap=soft_cap).to(torch.bfloat16)
    op = bound(device, torch.bfloat16)
    exact = case.oracle()
    error, allowed = ((case.run(o).double() - exact).norm() for o in (op, TorchPages(device)))
    assert error <= 2 * allowed
    plan = op.prepare(case.spans, case.shape)
    assert plan.left is None and plan.decode and plan.tree and plan.prefill


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_other_sizes(page: int, head_dim: int, device: str) -> None:
    case = random_case(5, ["decode", "chain"], page=page, head_dim=head_dim, kv_heads=1, group=8).to(
        torch.float16
    )
    op = bound(device, torch.float16, head_dim=head_dim, page=page)
    exact = case.oracle()
    error, allowed = ((case.run(o).double() - exact).norm() for o in (op, TorchPages(device)))
    assert error <= 2 * allowed


def test_an_empty_step_and_spans_without_rows(device: str) -> None:
    case = random_case(1, ["decode"], page=16, head_dim=64).to(torch.bfloat16)
    op = bound(device, torch.bfloat16)
    empty = AttentionSpan(0, 4, (0,), ())
    plan = op.prepare([empty, *case.spans, empty], case.shape)
    got = op.run(plan, case.q, case.k.clone(), case.v.clone())
    assert torch.equal(got, case.run(op))
    nothing = op.run(op.prepare([empty], case.shape), case.q[:0], case.k, case.v)
    assert nothing.shape == (0, case.q.shape[1] * case.q.shape[2])


def test_what_was_chosen_is_in_the_name_and_the_rest_is_torch(device: str) -> None:
    name = bound(device, torch.bfloat16).name
    assert name.startswith("paged_decode:") and "+tree_attention:" in name and "fwd:" in name
    assert isinstance(bound(device, torch.float64), TorchPages)
    assert isinstance(bound(device, torch.float64, numerics="pinned"), PinnedAttention)


def test_without_interpreter_and_gpu_torch_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert isinstance(bound("cpu", torch.bfloat16), TorchPages)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_engine_on_the_kernels_continues_like_one_on_torch(
    lab: ModuleType, family: str, device: str
) -> None:
    """Whole runs: chunked prompts, batched decodes, drafts; logits part only by the noise of the dtype."""
    prompts = [[5, 9, 2] * 9, [7] * 4]

    def run(attention: str) -> tuple[list[list[int]], list[list[float]], str]:
        uses = (attention, "paged:page_size=16", "ngram")
        engine = lab.make_engine(
            *uses, family=family, dtype="float32", numerics="fast", pool=256, context=64, device=device
        )
        ran = lab.run_engine(engine, prompts, max_tokens=6, logprobs=0)
        names = [f"r{i}" for i in range(len(prompts))]
        return [ran.ids(n) for n in names], [ran.logprobs(n) for n in names], engine.path[0]

    ids, scores, path = run("triton")
    plain_ids, plain_scores, _ = run("sdpa")
    assert path.startswith("attention:paged_decode:")
    assert ids == plain_ids
    for got, wanted in zip(scores, plain_scores, strict=True):
        assert got == pytest.approx(wanted, abs=1e-4)
