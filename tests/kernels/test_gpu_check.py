"""The GPU check without a GPU: cases, verdicts, arithmetic; each kernel's smallest case really runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from workbench.kernels import CATALOGUE
from workbench.kernels.bench import judge, roofline, roster, tasks, timing
from workbench.kernels.bench.baselines import packed_sdpa as sdpa_on
from workbench.kernels.bench.case import Case, Goal, Lab, Trial
from workbench.kernels.bench.poison import poisoned
from workbench.kernels.spec import Cost
from workbench.spec.errors import OptionError

KERNELS = roster.covered()
CASES = roster.chosen()


def test_every_kernel_of_the_catalogue_has_cases() -> None:
    assert roster.uncovered() == []
    assert list(CATALOGUE) == KERNELS
    for kernel in KERNELS:
        timed = [case.timed for case in roster.cases_of(kernel)]
        assert timed == sorted(timed) and {False, True} == set(timed), kernel


def test_cases_are_named_once_and_found_by_name() -> None:
    assert len({case.key for case in CASES}) == len(CASES)
    for case in CASES:
        assert roster.find(case.key) is case
        assert case.kernel in KERNELS and case.cost.bytes > 0
    assert {c.kernel for c in roster.chosen(["w4a16", "moe_align: ragged"])} == {"w4a16", "moe_align"}
    with pytest.raises(OptionError, match="nope"):
        roster.chosen(["nope"])
    with pytest.raises(OptionError, match="w4a16: nope"):
        roster.find("w4a16: nope")


def test_goals_are_ordered_and_name_what_is_measured() -> None:
    lab = Lab(torch.device("cpu"), 0)
    assert sum(bool(case.goals) for case in CASES) >= 15
    for case in CASES:
        for goal in case.goals:
            assert 0 < goal.must <= goal.target <= goal.stretch
            assert case.timed or goal.of
            if case.timed and goal.of:
                small = next(c for c in roster.cases_of(case.kernel) if not c.timed)
                trial = small.make(lab, **small.sizes)
                assert goal.of in trial.baselines, case.key
    for kernel in KERNELS:
        timed = {c.name for c in roster.cases_of(kernel) if c.timed}
        for relation in roster.relations_of(kernel):
            assert {relation.first, relation.second} <= timed


def test_goals_have_four_levels() -> None:
    goal = Goal(3.0, 4.0, 5.0)
    assert [goal.level(v) for v in (2.9, 3.0, 4.5, 5.0)] == ["below must", "must", "target", "stretch"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_smallest_case_of_each_kernel_passes(kernel: str, device: str) -> None:
    """The case, its reference and its kernel, on poisoned memory; in the interpreter or emulator on a CPU."""
    case = roster.cases_of(kernel)[0]
    parts = list(tasks.check(case, Lab(torch.device(device), torch.seed() % 2**31)))
    assert parts[0] == tasks.armed(case.key)
    assert parts[-1]["passed"], parts[-1]["outputs"]


def test_baselines_compute_what_the_kernel_does() -> None:
    """On the smallest case that has them; torch's fused attention needs a GPU, its math backend does not."""
    math = sdpa_on(SDPBackend.MATH)
    agreed = set()
    for kernel in KERNELS:
        case = next((c for c in roster.cases_of(kernel) if small(c).baselines), None)
        if case is None:
            continue
        trial = small(case)
        exact = trial.exact()
        for name, baseline in trial.baselines.items():
            named = (math if name.startswith("SDPA") else baseline)(**trial.arguments)
            for output in named.keys() & exact.keys():
                assert tasks._difference(exact[output], named[output]) < tasks.DISAGREE, (case.key, name)
                agreed.add(kernel)
    assert agreed >= {"fa3_fwd", "paged_decode", "w4a16", "w8a8", "moe_grouped", "hadamard"}


def small(case: Case) -> Trial:
    if case.timed:
        return Trial({}, dict, dict)
    return case.make(Lab(torch.device("cpu"), 5), **case.sizes)


@pytest.mark.parametrize("spoiled", ["element", "nan", "missing", "shape"])
def test_a_case_with_wrong_numbers_fails(spoiled: str, device: str) -> None:
    case = roster.find("w4a16: M=5, 72 x 256, centres per 32")

    def make(lab: Lab, **sizes: object) -> object:
        trial = case.make(lab, **sizes)

        def call(**arguments: object) -> dict[str, torch.Tensor]:
            y = trial.call(**arguments)["y"]
            if spoiled == "missing":
                return {}
            if spoiled == "shape":
                return {"y": y[1:]}
            y[3, 7] = torch.nan if spoiled == "nan" else y[3].norm()
            return {"y": y}

        return replace(trial, call=call)

    *_, answer = tasks.check(replace(case, make=make), Lab(torch.device(device), 1))
    assert not answer["passed"] and answer["outputs"]["y"]["wrong"]


def test_one_wrong_row_of_thousands_does_not_drown() -> None:
    exact = torch.randn(400_000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = exact.bfloat16()
    right = {"out": exact.bfloat16()}
    assert judge.passes(judge.judged(right, {"out": exact}, {"out": plain}, {}))
    wrong = exact.bfloat16()
    wrong[777] = exact[778].bfloat16()
    found = judge.judged({"out": wrong}, {"out": exact}, {"out": plain}, {})["out"]
    assert found["error"] < found["allowed"] and "row" in found["wrong"]


def test_empty_rows_are_met_exactly_and_bits_where_asked() -> None:
    exact = torch.tensor([[1.0, -torch.inf]], dtype=torch.float64)
    assert judge.passes(judge.judged({"lse": exact.float()}, {"lse": exact}, {}, {"lse": 1e-6}))
    for bad in ([[1.0, -3.0]], [[1.0, torch.nan]], [[torch.inf, -torch.inf]]):
        found = {"lse": torch.tensor(bad)}
        assert not judge.passes(judge.judged(found, {"lse": exact}, {}, {"lse": 1e-6}))
    codes = torch.arange(10, dtype=torch.int8)
    assert judge.passes(judge.judged({"c": codes}, {"c": codes.clone()}, {}, {"c": 0.0}))
    off = judge.judged({"c": codes}, {"c": codes + (codes == 3)}, {}, {"c": 0.0})
    assert off["c"]["wrong"] == "1 of 10 elements differ"
    assert not judge.passes({})


def test_unwritten_memory_is_poisoned_and_only_there() -> None:
    with poisoned():
        assert torch.empty(8).isnan().all()
        assert torch.empty(8, dtype=torch.float8_e4m3fn).float().isnan().all()
        assert torch.zeros(3).new_empty(4, dtype=torch.bfloat16).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == 2**31 - 1).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_floors_rates_and_fractions() -> None:
    ceilings = roofline.Ceilings({"bf16": 800e12, "bytes": 4e12}, measured=True)
    compute = roofline.floor(Cost(int(8e12), int(4e9)), "bf16", ceilings)
    assert compute == roofline.Floor(0.01, "bf16")
    moved = roofline.floor(Cost(int(8e9), int(4e10)), "bf16", ceilings)
    assert moved.by_bytes and moved.seconds == 0.01
    assert roofline.fraction(moved, 0.02) == 0.5
    assert roofline.rate(Cost(int(8e12), int(4e9)), "bf16", 0.02) == (400.0, "TFLOP/s")
    assert roofline.rate(Cost(int(8e9), int(4e10)), "bf16", 0.02) == (2.0, "TB/s")
    unknown = roofline.floor(Cost(10, 10), "int8", roofline.Ceilings({}, measured=True))
    assert roofline.fraction(unknown, 1.0) is None


def test_inputs_rotate_past_the_cache_and_repeats_fill_a_span() -> None:
    l2 = 50 * 2**20
    assert timing.copies(2**30, l2) == 1
    assert timing.copies(34 * 2**20, l2) == 5  # 5 x 34 MiB is more than three caches
    assert timing.copies(1, l2) == 64
    assert timing.repeats(1e-6) == timing.MOST
    assert timing.repeats(1.0) == timing.LEAST
    assert timing.repeats(5e-3) == 30
    assert timing.repeats(5e-3, sets=7) == 35  # every set as often as the others
    found = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0], "events")
    assert (found.median, found.low, found.high, found.repeats) == (6.0, 2.0, 10.0, 11)
