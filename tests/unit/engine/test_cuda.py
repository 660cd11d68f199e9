"""The engine on an NVIDIA GPU: the same tokens as on the CPU, honest clocks, memory that comes back."""

from __future__ import annotations

import gc
from time import perf_counter
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.cuda
RECIPES = [
    (),
    ("paged:page_size=16", "prefix_cache", "chunked_prefill:budget=16"),
    ("ngram:k=4",),
    ("paged:page_size=16", "draft_model:k=3,layers=1", "fused_round"),
    ("kv_int8",),
    ("kv_fp8",),
    ("kivi:residual=32",),
    ("reference",),
    ("rtn:bits=8",),
]


@pytest.mark.parametrize("uses", RECIPES, ids=lambda u: "+".join(u) or "plain")
def test_float64_on_the_gpu_gives_the_tokens_of_the_cpu(lab: ModuleType, uses: tuple[str, ...]) -> None:
    prompts = lab.prompts_of(4)
    cpu = lab.run_engine(lab.make_engine(*uses), prompts, max_tokens=16)
    gpu = lab.run_engine(lab.make_engine(*uses, device="cuda"), prompts, max_tokens=16)
    assert [gpu.ids(f"r{i}") for i in range(4)] == [cpu.ids(f"r{i}") for i in range(4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_class_runs_and_seeds_reproduce(lab: ModuleType, dtype: str) -> None:
    kw = {"max_tokens": 16, "temperature": 0.8, "seed": 3}
    make = {"dtype": dtype, "numerics": "fast", "device": "cuda"}
    one, two = (lab.run_engine(lab.make_engine("paged", **make), [[1, 2, 3, 4]], **kw) for _ in range(2))
    assert one.ids() == two.ids()
    assert len(one.ids()) == 16


def test_smp_05_a_function_timed_against_itself_takes_as_long(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", dtype="float32", numerics="fast", device="cuda")
    lab.run_engine(engine, [[1, 2, 3]], max_tokens=8)  # the first call compiles and allocates

    def seconds() -> float:
        torch.cuda.synchronize()
        start = perf_counter()
        lab.run_engine(engine, [[5, 4, 3, 2]], max_tokens=64)
        torch.cuda.synchronize()
        return perf_counter() - start

    runs = sorted(seconds() for _ in range(9))
    assert runs[4] / runs[2] < 1.10


def test_nbw_13_memory_of_a_failed_step_comes_back(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", dtype="float32", numerics="fast", device="cuda")
    lab.run_engine(engine, [[1, 2, 3]], max_tokens=2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    forward = engine.executor.forward

    def fail(*args: object, **kwargs: object) -> None:
        held = torch.zeros(50_000_000, device="cuda")
        raise torch.OutOfMemoryError(f"{held.numel()} elements do not fit")

    engine.executor.forward = fail
    with pytest.raises(torch.OutOfMemoryError):
        lab.run_engine(engine, [[1, 2, 3]], max_tokens=2)
    engine.reset()
    engine.executor.forward = forward
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**20
    assert len(lab.run_engine(engine, [[1, 2, 3]], max_tokens=2).ids()) == 2


def test_att_05_rows_beyond_two_gigabytes_are_addressed_in_64_bits() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 8 * 2**30:
        pytest.skip("needs 8 GiB of GPU memory")
    rows, width = 131_073, 16_384
    pool = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    pool[-1] = torch.arange(width, device="cuda").half()
    index = torch.tensor([rows - 1], device="cuda")
    assert torch.equal(pool.index_select(0, index)[0], torch.arange(width, device="cuda").half())
