"""What tests of drafters share: no gradients where a file asks for it, and what an engine said and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.engine.engine import Engine


@pytest.fixture
def inference() -> Iterator[None]:
    """No gradients; for ``pytest.mark.usefixtures``."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def outcome(lab: ModuleType) -> Callable[..., tuple[list[Any], list[Any]]]:
    """``outcome(engine, prompts, **params)``: ids and log-probabilities by prompt, and the judged drafts.

    Pages and tensors of drafts have been given back by then: nothing outlives a step.
    """

    def ran(engine: Engine, prompts: Any, **params: Any) -> tuple[list[Any], list[Any]]:
        asked = {"max_tokens": 14, "ignore_eos": True, "logprobs": 0, **params}
        found = lab.run_engine(engine, prompts, **asked)
        engine.kv.check()
        assert not any(pool.used for pool in engine.kv.pools)
        assert engine.drafting.nbytes() == 0
        out = [(found.ids(f"r{i}"), found.logprobs(f"r{i}")) for i in range(len(prompts))]
        return out, [d for step in found.steps for d in step.drafts]

    return ran
