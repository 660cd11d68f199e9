"""Predictions against closed forms, and against machines whose costs are known to the last digit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from workbench.core.drafters.contestants import Traits
from workbench.core.drafters.costs import LENGTHS, Costs
from workbench.core.drafters.crossing import crossing
from workbench.core.drafters.forecast import at_batch, doublings, forecast, off
from workbench.core.drafters.results import predictions, ratio
from workbench.core.drafters.turns import Step, Turn
from workbench.spec.errors import RecordError
from workbench.speculative import predict

REST, OVERHEAD = 1.0, 0.5  # ms of a plain step beside its forward; what a draft adds for each sequence


def forward(rows: float) -> float:
    """The machine: free up to 8 rows, then in proportion."""
    return 20.0 + 2.0 * max(0.0, rows - 8)


def costs(batch: int, curve: Callable[[float], float] = forward) -> Costs:
    """As padded steps would measure them; committing drafts costs ``OVERHEAD`` a sequence."""
    rest = {n: REST + OVERHEAD * batch * (n > 0) for n in LENGTHS}
    return Costs.of(
        batch,
        [
            Step(batch * (n + 1), batch if n else 0, n, 0, curve(batch * (n + 1)), 0.0, rest[n])
            for n in LENGTHS
        ],
    )


def drafted(
    batch: int,
    gamma: int,
    kept: Callable[[], int],
    *,
    steps: int = 400,
    each: float = 1.0,
    batched: bool = True,
    share: float = 1.0,
    draw: random.Random | None = None,
    curve: Callable[[float], float] = forward,
) -> Turn:
    """Rounds on the machine: a draft of ``gamma`` levels for ``share`` of the sequences, ``each`` ms a level
    of all together (``batched``, in passes that slow down as plain steps do) or of one sequence."""
    draw = draw or random.Random(1)
    out, drafts = [], []
    for i in range(steps):
        having = sum(draw.random() < share for _ in range(batch)) if share < 1 else batch
        here = [kept() for _ in range(having)]
        drafts += [(gamma, k, k + 1) for k in here]
        rows = batch + having * gamma
        slower = curve(batch) / curve(1) if batched else having
        noise = 30.0 if i % 50 == 7 else 0.0  # another program, now and then
        out.append(
            Step(rows, having, gamma if having else 0, batch + sum(here), curve(rows),
                 gamma * each * slower if having else 0.0, REST + OVERHEAD * having + noise)
        )  # fmt: skip
    return Turn(batch, tuple(out), tuple(drafts), ((1,),) * batch)


def plain(batch: int, curve: Callable[[float], float] = forward) -> Turn:
    steps = [Step(batch, 0, 0, batch, curve(batch), 0.0, REST) for _ in range(60)]
    return Turn(batch, tuple(steps), (), ((1,),) * batch)


def geometric(alpha: float, gamma: int, seed: int = 3) -> Callable[[], int]:
    draw = random.Random(seed)

    def kept() -> int:
        n = 0
        while n < gamma and draw.random() < alpha:
            n += 1
        return n

    return kept


@pytest.mark.parametrize("gamma", [1, 4, 12])
def test_with_the_same_draft_in_every_step_it_is_the_closed_form(gamma: int) -> None:
    found = forecast([drafted(1, gamma, lambda: gamma // 2)], [plain(1)], costs(1))
    step = forward(1) + REST
    v = 1 + (forward(gamma + 1) - forward(1)) / step
    expected = predict.speedup(1 + gamma // 2, gamma, v, 1.0 / step, OVERHEAD / step)
    assert found.speedup == pytest.approx(expected)
    assert (found.tokens, found.verify) == (1 + gamma // 2, pytest.approx(v))


def test_leviathans_theorem_where_checking_is_free() -> None:
    turn = drafted(1, 4, geometric(0.7, 4), steps=20_000, curve=lambda rows: 20.0)
    free = Costs(1, tuple((float(n + 1), 20.0, REST + OVERHEAD) for n in LENGTHS))
    found = forecast([turn], [plain(1)], free)
    assert found.tokens == pytest.approx(predict.expected_tokens(0.7, 4), rel=0.02)
    step = 20.0 + REST
    assert found.speedup == pytest.approx(
        predict.speedup(found.tokens, 4, 1.0, 1.0 / step, OVERHEAD / step), rel=1e-3
    )


def test_steps_without_a_draft_and_other_programs_are_accounted_for() -> None:
    turn = drafted(1, 4, lambda: 2, share=0.25, steps=2000)
    found = forecast([turn], [plain(1)], costs(1))
    share = sum(s.drafted for s in turn.steps) / len(turn.steps)
    step = forward(1) + REST
    gain = (1 + 2 * share) / (1 + share * (4 * 1.0 + OVERHEAD) / step)
    assert found.speedup == pytest.approx(gain, rel=1e-9)  # not 2 % less, which the noise took
    with pytest.raises(RecordError):
        forecast([Turn(1, (), (), ())], [plain(1)], costs(1))


def test_a_drafter_that_runs_some_of_the_models_layers_pays_the_rest_of_them() -> None:
    turn = drafted(1, 3, lambda: 3, curve=lambda rows: forward(rows) - 6.0)
    whole = forecast([turn], [plain(1)], costs(1))
    rest = forecast([turn], [plain(1)], costs(1), own_forward=True)
    step = forward(1) + REST
    assert whole.verify == pytest.approx(1.0) and rest.verify == pytest.approx(1 - 6.0 / step)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_batch_1_predicts_any_batch_and_where_it_stops_paying(batched: bool, share: float) -> None:
    """BAR: within one power of two; here, without noise in costs, much closer."""
    sizes = (1, 2, 4, 8, 16)
    sides, known = {}, {}
    for b in sizes:
        kept = geometric(0.6, 4, seed=b)
        turn = drafted(
            b, 4, kept, share=share, batched=batched, each=0.7, draw=random.Random(b), steps=3000 // b
        )
        sides[b], known[b] = ([turn], [plain(b)]), costs(b)
    found = crossing("set", "d", sides, known, Traits(batched, False))
    assert found is not None and found.batches == sizes
    for said, real in zip(found.predicted, found.measured, strict=True):
        assert abs(off(said, real)) < 0.12
    assert found.at is not None and found.predicted_at is not None
    assert found.doublings == pytest.approx(0, abs=0.35)
    assert found.measured[0] > 1 > found.measured[-1]
    names = {m.name: m.tag for m in found.metrics()}
    assert names["set:d:stops_paying"] == "measured" and names["set:d:stops_paying_predicted"] == "predicted"


def test_at_batch_1_both_predictions_are_one() -> None:
    turns = [drafted(1, 4, geometric(0.6, 4))]
    here = forecast(turns, [plain(1)], costs(1))
    there = at_batch(turns, [plain(1)], costs(1), costs(1), batched=True)
    assert there.speedup == pytest.approx(here.speedup)


def test_crossover_needs_batch_1_and_another_size() -> None:
    one = ([drafted(1, 2, lambda: 1)], [plain(1)])
    assert crossing("s", "d", {1: one}, {1: costs(1)}, Traits(True, False)) is None
    two = ([drafted(2, 2, lambda: 1)], [plain(2)])
    assert crossing("s", "d", {2: two, 4: two}, {2: costs(2), 4: costs(4)}, Traits(True, False)) is None


@pytest.mark.parametrize(
    ("predicted", "measured", "apart"),
    [
        ((1.5, 0.5), (1.5, 0.5), 0.0),
        ((1.5, 1.2), (1.5, 1.2), None),
        ((0.9, 0.5), (1.5, 1.2), 4.0),
        ((1.5, 1.2), (0.9, 0.5), 4.0),
    ],
)
def test_how_far_crossovers_are_apart(
    predicted: Sequence[float], measured: Sequence[float], apart: float | None
) -> None:
    assert doublings((1, 16), predicted, measured) == apart


def test_each_half_is_predicted_from_the_other() -> None:
    """Acceptance differs between the halves, and the error says so."""
    mine = [drafted(1, 4, lambda: 1), drafted(1, 4, lambda: 3)]
    base = [plain(1), plain(1)]
    said = predictions(mine, base, [0, 1], costs(1), False)
    (first, own_first, real_first), (second, own_second, real_second) = said
    assert real_first == pytest.approx(ratio(mine[:1], base[:1])) and real_second > 1.5 * real_first
    assert first == pytest.approx(real_second, rel=0.03) and second == pytest.approx(real_first, rel=0.03)
    assert own_first == pytest.approx(real_first, rel=0.03)  # but for the noise, which only time sees
    assert own_second == pytest.approx(real_second, rel=0.03)
    assert predictions(mine, base, [0, 0], costs(1), False) == []
