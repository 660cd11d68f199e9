"""An exit of the target as a proxy: what a deeper one foresees, and that it decides nothing else."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import HeadMismatch, OptionError
from workbench.speculative.draft_model import cut_out
from workbench.speculative.placement.early_exit import ExitAdapter, ExitDecoder, ExitProxy
from workbench.speculative.placement.mirror import MirrorDrafter
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.verify import ExactVerify

pytestmark = pytest.mark.usefixtures("inference")


def run(lab: ModuleType, layers: int, kappa: int) -> tuple[float, list[int]]:
    """Reuse rate and output with the exit behind ``layers`` layers as the proxy."""
    base = lab.make_engine("paged", page_size=4)
    target = base.executor.decoder
    proxy = ExitProxy(ExitDecoder(target, layers), kappa + 1)
    drafter = MirrorDrafter(TreeKV(cut_out(target, (0,))), gamma=2, kappa=kappa, proxy=proxy)
    engine = Engine(
        base.executor, base.kv, base.scheduler, context=256, drafter=drafter, verify=ExactVerify()
    )
    (prompt,) = lab.prompts_of(1, seed=8, low=6, high=12)
    engine.add(Request("r0", tuple(prompt), SamplingParams(max_tokens=24, ignore_eos=True)))
    ids: list[int] = []
    while engine.has_work:
        ids += [t.id for e in engine.step()[1] for t in e.tokens]
    rate = drafter.stats.reuse_rate
    assert rate is not None
    return rate, ids


def test_the_last_layer_foresees_every_verdict(lab: ModuleType) -> None:
    (prompt,) = lab.prompts_of(1, seed=8, low=6, high=12)
    plain = lab.run_engine(lab.make_engine("paged"), [prompt], max_tokens=24, ignore_eos=True).ids()
    rates = {}
    for layers, kappa in ((2, 1), (1, 1), (1, 4)):
        rates[layers, kappa], ids = run(lab, layers, kappa)
        assert ids == plain
    assert rates[2, 1] == 1.0  # its likeliest token is the verdict
    assert rates[1, 1] <= rates[1, 4] <= 1.0 and rates[1, 1] < 1.0


def test_a_proxy_ranks_as_if_it_had_computed_all_afresh(lab: ModuleType) -> None:
    target = lab.make_engine("paged").executor.decoder
    size = target.config.hidden_size
    adapter = ExitAdapter(torch.ones(size), 0.1 * torch.randn(size, size, generator=torch.manual_seed(0)))
    bare, adapted = ExitDecoder(target, 1), ExitDecoder(target, 1, adapter)
    warm = ExitProxy(adapted, 5)
    for tokens, path in (([1, 2, 3], ()), ([1, 2, 3], (4,)), ([1, 2, 3], (9, 8)), ([1, 2], ()), ([7], (1,))):
        assert warm(tokens, path) == ExitProxy(adapted, 5)(tokens, path)
    assert ExitProxy(bare, 61)([1, 2, 3], ()) != ExitProxy(adapted, 61)([1, 2, 3], ())
    nothing = ExitAdapter(torch.ones(size), torch.zeros(size, size))
    assert ExitProxy(bare, 61)([1, 2, 3], ()) == ExitProxy(ExitDecoder(target, 1, nothing), 61)([1, 2, 3], ())


def test_an_adapter_of_another_width_is_refused(lab: ModuleType) -> None:
    target = lab.make_engine("paged").executor.decoder
    with pytest.raises(HeadMismatch, match="8 wide"):
        ExitDecoder(target, 1, ExitAdapter(torch.ones(8), torch.zeros(8, 8)))


@pytest.mark.parametrize("layers", [0, 3])
def test_an_exit_that_is_not_there_is_refused(lab: ModuleType, layers: int) -> None:
    with pytest.raises(OptionError):
        ExitDecoder(lab.make_engine("paged").executor.decoder, layers)
