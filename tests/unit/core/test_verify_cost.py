"""v(T) of a real engine: as many rows as asked for, plain steps among them, refused where it says nothing."""

import pytest

from workbench.core.session import Session
from workbench.core.verify_cost import drafting, measure_step_curve, measure_verify_cost
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe


@pytest.fixture(scope="module")
def tiny():
    with Session("tiny", Recipe.of("paged", "ngram", "goodput"), dtype="float32") as session:
        yield session


@pytest.mark.parametrize("batch", [1, 3])
def test_every_length_is_measured_at_the_rows_it_has(tiny, batch):
    costs = measure_verify_cost(tiny, lengths=(0, 2, 7), batch=batch, context=24, rounds=4)
    assert (costs.batch, costs.plain_steps, costs.rounds) == (batch, 4, 8)
    assert costs.forward.rows.tolist() == [batch * n for n in (1, 3, 8)]
    assert costs.verify(batch) == 1 <= costs.verify(8 * batch)
    assert costs.plain_ms > 0
    assert tiny.recipe == Recipe.of("paged", "ngram", "goodput")


def test_curves_over_batches_have_the_rows_of_every_size(tiny):
    plain, drafted = measure_step_curve(tiny, (1, 4), 2, context=16, rounds=3)
    assert plain.rows.tolist() == [1, 4] and drafted.rows.tolist() == [3, 12]
    assert plain.ms[0] <= plain.ms[1] and 0 < drafted.ms[0] <= drafted.ms[1]


def test_what_drafts_is_read_from_the_catalogue(tiny):
    assert drafting(tiny) == {"ngram", "goodput"}


@pytest.mark.parametrize("lengths", [(1, 2), (0, 99), (0, -1)])
def test_lengths_that_say_nothing_are_refused(tiny, lengths):
    with pytest.raises(OptionError, match="cannot be measured"):
        measure_verify_cost(tiny, lengths=lengths)
