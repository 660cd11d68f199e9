"""Several samples of one prompt: a head that was shown the prompt's states drafts with them for each."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from workbench.core.build import standalone_engine
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe


@pytest.mark.parametrize(
    ("model", "drafter"),
    [
        ("tiny", "eagle3:depth=3"),
        ("tiny", "eagle3:depth=3,width=3"),
        ("tiny", "eagle:tree=chain"),
        ("tiny", "fasteagle"),
        ("tiny", "medusa"),
        ("tiny", "hybrid:lead=16"),
        ("tiny-mtp", "mtp:k=2"),
    ],
)
def test_equal_samples_have_equal_drafts(
    lab: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, drafter: str
) -> None:
    """At temperature 0 all samples say the same; the prompt ends within a page."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    source = open_source(model)
    made = require(
        plan(
            Recipe.of("paged", drafter),
            ModelFacts(model, source.config, source.fingerprint),
            dtype="float32",
            limits=EngineLimits(2048, 0, 4, 256),
        )
    )
    with torch.inference_mode():
        engine = standalone_engine(made, Decoder(source.config, build_weights(made, source)))
        prompt = tuple(3 + (7 * i * i + i) % 500 for i in range(40))
        engine.add(Request("a", prompt, SamplingParams(max_tokens=12, n=3, ignore_eos=True)))
        steps = lab.run_engine(engine).steps
        engine.kv.check()
    drafts = [[(d.tokens, d.parents, d.accepted) for d in s.drafts] for s in steps if s.drafts]
    assert len(drafts) > 3
    for one, *others in drafts:
        assert others == [one, one]
